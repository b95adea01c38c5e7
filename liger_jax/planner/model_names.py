"""Ids of models beside those that are named after a size of their family, and kinds of models that are not here."""

import re
from collections.abc import Iterable

# Endings of ids whose weights are quantised by bitsandbytes, which models here read, and by others.
_BITSANDBYTES = re.compile(r"(-unsloth)?-bnb-4bit$")
_OTHER_FORMATS = re.compile(
    r"[-_.](gguf|awq|gptq|exl2|mlx|onnx|fp8|nvfp4|mxfp4|int4|int8|w4a16|w8a8|8bit|4bit|2bit|aqlm|hqq|bnb-8bit)\b"
)

_16K, _32K, _256K = (dict(max_position_embeddings=n) for n in (16384, 32768, 262144))
_4K = dict(max_position_embeddings=4096)
_R1 = dict(max_position_embeddings=131072)
_CODE_LLAMA = dict(vocab_size=32016, rope_theta=1000000.0) | _16K
_QWEN2_SIZES = ("0.5b", "1.5b", "7b", "72b")
_QWEN2_5_SIZES = ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b")
_QWEN3_SIZES = ("0.6b", "1.7b", "4b", "8b", "14b")

# For an id without its organisation: the model whose config it has, and the fields in which it differs.
VARIANTS: dict[str, tuple[str, dict]] = {
    **{f"gemma-2-{size}-it": (f"gemma-2-{size}", dict(torch_dtype="bfloat16")) for size in ("2b", "9b", "27b")},
    **{f"qwen2-{size}-instruct": (f"qwen2-{size}", _32K) for size in _QWEN2_SIZES},
    **{f"qwen2.5-{size}-instruct": (f"qwen2.5-{size}", _32K) for size in _QWEN2_5_SIZES},
    **{f"qwen2.5-coder-{size}": (f"qwen2.5-{size}", _32K) for size in _QWEN2_5_SIZES[:-1]},
    **{f"qwen2.5-math-{size}": (f"qwen2.5-{size}", _4K) for size in ("1.5b", "7b", "72b")},
    **{f"qwen3-{size}-base": (f"qwen3-{size}", _32K) for size in _QWEN3_SIZES},
    "qwen3-4b-instruct-2507": ("qwen3-4b", _256K | dict(rope_theta=5000000.0)),
    "qwen3-4b-thinking-2507": ("qwen3-4b", _256K | dict(rope_theta=5000000.0)),
    "qwq-32b": ("qwen2.5-32b", {}),
    "deepseek-r1-distill-qwen-1.5b": ("qwen2.5-1.5b", dict(tie_word_embeddings=False)),
    "deepseek-r1-distill-qwen-7b": ("qwen2.5-7b", _R1),
    "deepseek-r1-distill-qwen-14b": ("qwen2.5-14b", _R1),
    "deepseek-r1-distill-qwen-32b": ("qwen2.5-32b", _R1),
    "deepseek-r1-distill-llama-8b": ("llama-3.1-8b", {}),
    "deepseek-r1-distill-llama-70b": ("llama-3.3-70b", {}),
    "deepseek-r1-0528-qwen3-8b": ("qwen3-8b", _R1),
    **{
        f"qwen3-vl-{size}{end}": (f"qwen3-{own}", dict(rope_theta=5e6, max_position_embeddings=262144))
        for size, own in (("2b", "1.7b"), ("4b", "4b"), ("8b", "8b"), ("32b", "32b"))
        for end in ("", "-thinking")
    },
    "llama-3.1-nemotron-70b": ("llama-3.1-70b", {}),
    "llama-guard-3-1b": ("llama-3.2-1b", {}),
    "llama-guard-3-8b": ("llama-3.1-8b", {}),
    "codellama-7b": ("llama-2-7b", _CODE_LLAMA | dict(torch_dtype="bfloat16")),
    "codellama-13b": ("llama-2-13b", _CODE_LLAMA | dict(torch_dtype="bfloat16")),
    "vicuna-7b-v1.5": ("llama-2-7b", {}),
    "vicuna-13b-v1.5": ("llama-2-13b", {}),
    "zephyr-7b-alpha": ("mistral-7b-v0.1", {}),
    "zephyr-7b-beta": ("mistral-7b-v0.1", {}),
    "mathstral-7b-v0.1": ("mistral-7b-v0.3", {}),
    "mistral-7b": ("mistral-7b-v0.3", {}),
    **{f"ministral-3-{size}-reasoning-2512": (f"ministral-3-{size}-2512", {}) for size in ("3b", "8b", "14b")},
    "mistral-nemo": ("mistral-nemo-2407", {}),
    "mistral-nemo-12b": ("mistral-nemo-2407", {}),
    "mistral-small-24b": ("mistral-small-24b-2501", {}),
    **{
        f"mistral-small-3.{n}": ("mistral-small-24b-2501", dict(rope_theta=1e9, max_position_embeddings=131072))
        for n in ("1-24b-2503", "2-24b-2506")
    },
    "olmo-2-1b": ("olmo-2-0425-1b", {}),
    "olmo-2-7b": ("olmo-2-1124-7b", {}),
    "olmo-2-13b": ("olmo-2-1124-13b", {}),
    "olmo-2-32b": ("olmo-2-0325-32b", {}),
    **{f"glm-z1-{size}-0414": (f"glm-4-{size}-0414", {}) for size in ("9b", "32b")},
    **{f"granite-3.{n}-{size}": (f"granite-3.1-{size}", {}) for n in (2, 3) for size in ("2b", "8b")},
    **{f"olmo-3-7b{end}": ("olmo-3-1025-7b", {}) for end in ("", "-think")},
    **{f"olmo-3{dot}-32b{end}": ("olmo-3-1125-32b", {}) for dot in ("", ".1") for end in ("", "-think")},
    "phi-3-mini": ("phi-3-mini-4k", {}),
    "phi-3-medium": ("phi-3-medium-4k", {}),
    "codegemma-2b": ("gemma-2b", {}),
    "codegemma-7b": ("gemma-7b", {}),
    "gemma-1.1-2b": ("gemma-2b", {}),
    "gemma-1.1-7b": ("gemma-7b", {}),
    "tinyllama": ("tinyllama-1.1b", {}),
    "tinyllama-v1.1": ("tinyllama-1.1b", dict(torch_dtype="float32")),
    "tinyllama-1.1b-v1.0": ("tinyllama-1.1b", {}),
    "tinyllama-1.1b-intermediate-step-1431k-3t": ("tinyllama-1.1b", dict(torch_dtype="float32")),
}  # fmt: skip

_HYBRID = re.compile(r"qwen3-next|qwen3\.5|olmo-hybrid")  # families that are here, whichever sizes are known
_MIXTURE = re.compile(r"mixtral|qwen3-\d+b-a\d|olmoe|gpt-oss")  # mixtures that are here, whichever sizes are known
_OTHER_MIXTURE = "a mixture of experts of another family"
# What a name says of a model that none of the families here is. The first kind that fits counts.
_KINDS = {
    _OTHER_MIXTURE: (
        r"mixtral|\d+x\d+(\.\d+)?b|\d+b-a\d+(\.\d+)?b|(?<![a-z])moe(?![a-z])|olmoe|phimoe|gpt-oss|llama-?4|dbrx|grok"
        r"|deepseek-(v2|v3|r1(?!-distill|-0528-qwen)|coder-v2)|kimi-k2|glm-(4\.[5-9]|5)|minimax|qwen3-coder"
        r"|qwen2-57b|arctic|jetmoe"
    ),
    "a state-space or recurrent model": (
        r"mamba|rwkv|jamba|zamba|bamba|hymba|falcon-?h1|granite-4|nemotron-(h|nano-9b)|recurrentgemma|xlstm|hyena"
    ),
    "a diffusion model": r"diffusion|sdxl|(?<![a-z])sd-?3|(?<![a-z])flux|llada|pixart|(?<![a-z])wan2",
    "a model of sound": r"whisper|audio|speech|wav2vec|hubert|musicgen|voxtral|(?<![a-z])(bark|tts|asr)(?![a-z])",
    "a model of images beside text": (
        r"(?<![a-z])vl(?![a-z])|vision|llava|pixtral|paligemma|idefics|internvl|smolvlm|molmo|cogvlm|omni|minicpm-?[vo]"
        r"|gemma-?3n|mistral-small-3\.[12]|qwen-?vl|multimodal|(?<![a-z])(clip|siglip|vit)(?![a-z])"
    ),
    "an embedding or a reward model": r"embed|rerank|reward|(?<![a-z])(e5|bge|gte|prm|rm)(?![a-z])|minilm|mpnet",
    "an encoder": r"bert|electra|ernie-[23]|xlm|xlnet",
    "an encoder with a decoder": r"(?<![a-z])(flan|t5|mt5|byt5|umt5|bart|mbart|ul2|nllb|m2m100|marian)|pegasus|t5gemma",
    "a model whose weights are not public": r"(?<![a-z])(gpt-?[345](?!all)|claude|gemini|chatgpt)",
    "of another family": (
        r"(?<![a-z])(gpt-?2|distilgpt2?|gpt-?neox?|gpt-?j|pythia|opt|bloomz?|mpt|falcon2?|phi-?[12]|stablelm|starcoder2?"
        r"|olmo(?!-?[23])|command|aya|c4ai|granite(?!-3\.\d-\d+b$)|chatglm[23]?|glm(?!-(4|z1)-\d+b-(base-)?0414)|internlm[23]?|baichuan2?|minicpm[34]?|exaone(?!-4)|nemotron"
        r"|cerebras|dolly|openelm|santacoder|codegen|persimmon|xglm|hunyuan-(a13b|large)|seed-oss|apertus|ernie|mimo"
        r"|qwen)(?![a-z\d])"
    ),
}  # fmt: skip


def without_quantization(name: str) -> tuple[str, str | None]:
    """Takes from an id the words that say how its weights are quantised."""
    short = _BITSANDBYTES.sub("", name)
    return short, None if short == name else "nf4"


def refusal(name: str, families: Iterable[str]) -> str | None:
    """Says of what kind a model is that cannot be planned, as far as its name says."""
    if _HYBRID.match(name):
        return None
    for kind, pattern in _KINDS.items():
        if kind == _OTHER_MIXTURE and _MIXTURE.match(name):
            continue
        if (match := re.search(pattern, name)) is not None:
            what = f"{kind}, {match[0]!r}" if kind.startswith("of ") else kind
            return f"is {what}, which is not supported. The families here are {', '.join(families)}."
    if (match := _OTHER_FORMATS.search(name)) is not None:
        return f"has its weights in {match[1].upper()}, which is not trained here. Name the model that it was made of."
    return None
