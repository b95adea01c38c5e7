"""Shapes of the fused loss by name, (N, D, V): tokens, width and vocabulary, most of them of a model's head."""

HEADS = {
    "llama-3-8b-head": (8192, 4096, 128256),
    "gemma-2-2b-head": (8192, 2304, 256000),
    "qwen2-0.5b-head": (4096, 896, 151936),
    "llama-3-70b-head": (16384, 8192, 128256),
}
# Their vocabularies are no multiples of 64: `--beside 256` measures the next multiple of 256 in the same rounds.
RAGGED_HEADS = {
    "gpt2-head": (8192, 768, 50257),
    "bart-large-head": (8192, 1024, 50265),
    "granite-2b-head": (8192, 2048, 49155),
    "llama-2-7b-padded-head": (8192, 4096, 32001),  # with a padding token
    "llama-3-8b-padded-head": (8192, 4096, 128257),
    "qwen2-0.5b-unpadded-head": (4096, 896, 151646),  # its tokens alone
    "round-head": (8192, 768, 50000),
}
SHAPES = (
    HEADS
    | RAGGED_HEADS
    | {
        "small": (2048, 2048, 32000),
        "tiny": (128, 64, 1024),  # for trying a program without a GPU
    }
)
