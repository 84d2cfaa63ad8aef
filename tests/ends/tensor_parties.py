"""x"""
TENSOR_PARTIES = {}
