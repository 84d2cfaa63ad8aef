"""Makes a tiny model that sees, with random weights: an encoder, a bridge, a decoder."""

import base64
import io

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessorPil,
    OPTConfig,
    PreTrainedTokenizerFast,
)
from vllm_model import WORDS

SIZE = 32
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
SPREAD = 4.0


@torch.no_grad()
def build(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    sight = Blip2VisionConfig(**LAYERS, intermediate_size=128, image_size=SIZE, patch_size=8)
    bridge = Blip2QFormerConfig(
        **LAYERS, vocab_size=len(WORDS), intermediate_size=128, encoder_hidden_size=64
    )
    text = OPTConfig(
        **LAYERS, vocab_size=len(WORDS), ffn_dim=128, word_embed_proj_dim=64,
        max_position_embeddings=512, pad_token_id=0, eos_token_id=2, bos_token_id=4,
    )  # fmt: skip
    config = Blip2Config(
        vision_config=sight.to_dict(), qformer_config=bridge.to_dict(), text_config=text.to_dict(),
        num_query_tokens=8, image_token_index=3,
    )  # fmt: skip
    made = Blip2ForConditionalGeneration._from_config(config, dtype=torch.float32)
    for each in made.parameters():
        if each.dim() > 1:
            each.mul_(SPREAD)
    return made


def save(folder: str, seed: int) -> None:
    named = ["<pad>", "<unk>", "<eos>", "<image>", "<bos>", *WORDS[5:]]
    words = {word: number for number, word in enumerate(named)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>",
        bos_token="<bos>", additional_special_tokens=["<image>"],
    )  # fmt: skip
    pixels = BlipImageProcessorPil(size={"height": SIZE, "width": SIZE})
    Blip2Processor(pixels, fast, num_query_tokens=8).save_pretrained(folder)
    build(seed).save_pretrained(folder)


def image() -> str:
    """One image, as the address that a chat's message has."""
    pixels = bytes((7 * k) % 251 for k in range(3 * SIZE * SIZE))
    file = io.BytesIO()
    Image.frombytes("RGB", (SIZE, SIZE), pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
