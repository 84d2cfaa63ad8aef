"""An engine of fused layers in a process of its own, whose parameters a trainer attaches to."""

from multiprocessing.connection import Connection

import torch
from fused_model import FusedModel, Shape

from shmbus.weights import Slice, share_model

SHAPE = Shape(
    layers=2, hidden=16, heads=4, kv_heads=2, head=4, inner=24, vocab=70, dtype=torch.float32
)


def parts(shape: Shape) -> dict[str, Slice]:
    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    found = {
        "model.embed_tokens.weight": Slice("embed", 0, 0, shape.vocab),
        "lm_head.weight": Slice("head", 0, 0, shape.vocab),
        "model.norm.weight": Slice("norm", 0, 0, shape.hidden),
    }
    for layer in range(shape.layers):
        at, own = f"model.layers.{layer}", f"layers.{layer}"
        found |= {
            f"{at}.self_attn.q_proj.weight": Slice(f"{own}.qkv", 0, 0, q),
            f"{at}.self_attn.k_proj.weight": Slice(f"{own}.qkv", 0, q, kv),
            f"{at}.self_attn.v_proj.weight": Slice(f"{own}.qkv", 0, q + kv, kv),
            f"{at}.self_attn.o_proj.weight": Slice(f"{own}.o", 0, 0, shape.hidden),
            f"{at}.input_layernorm.weight": Slice(f"{own}.input_norm", 0, 0, shape.hidden),
            f"{at}.post_attention_layernorm.weight": Slice(f"{own}.post_norm", 0, 0, shape.hidden),
            f"{at}.mlp.gate_proj.weight": Slice(f"{own}.gate_up", 0, 0, shape.inner),
            f"{at}.mlp.up_proj.weight": Slice(f"{own}.gate_up", 0, shape.inner, shape.inner),
            f"{at}.mlp.down_proj.weight": Slice(f"{own}.down", 0, 0, shape.hidden),
        }
    return found


def score(model: FusedModel) -> float:
    return float(sum(each.double().pow(2).sum() for each in model.parameters()))


def serve(pipe: Connection, bus: str, device: str) -> None:
    torch.set_num_threads(1)
    model = FusedModel(SHAPE, device=device)
    torch.manual_seed(1)
    for each in model.parameters():
        each.data.normal_()
    model.embed.data[SHAPE.vocab :] = 0
    model.head.data[SHAPE.vocab :] = 0
    with share_model(bus, model, slices=parts(SHAPE), version=0, writes=False) as shared:
        pipe.send("shared")
        while pipe.recv() == "score":
            try:
                with shared.reading(timeout=60) as version:
                    pipe.send((version, score(model)))
            except Exception as error:
                pipe.send((type(error).__name__, str(error)))
