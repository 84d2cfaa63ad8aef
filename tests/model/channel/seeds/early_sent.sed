# options: --scenario pair --preemptions 1 --deaths 0 --delays 0
# The count covers a message before its row is there.
s/^    row->kind = kind;/    atomic_store_explicit(\&self->header->sent, counts.sent + 1, memory_order_release);\n    row->kind = kind;/
