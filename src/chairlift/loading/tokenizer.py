"""The tokenizer of a checkpoint, with the variables its chat template uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from chairlift.errors import ChairliftError, CorruptCheckpoint, UnsupportedModel
from chairlift.loading.checkpoint import Checkpoint
from chairlift.loading.config_file import ConfigCheckpoint, read_optional_json_object
from chairlift.text.detokenizer import is_failure
from chairlift.text.tokenizer import Tokenizer as ModelTokenizer

MAX_TOKENIZER_BYTES = 1 << 28  # the largest known have about 35 MB

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Classes of transformers that replace the post-processor of tokenizer.json, and whether they add a beginning of text.
_REPLACING_CLASSES = {"GPTNeoXTokenizer": False, "CodeLlamaTokenizer": True}
# The model types that have these classes where a checkpoint names none.
_MODEL_TYPES = {
    False: {"falcon_mamba", "gpt_neox", "mamba", "mamba2", "mpt", "olmo", "olmoe", "rwkv", "xlstm"},
    True: {"code_llama"},
}


@dataclass(frozen=True)
class TokenizerFiles:
    tokenizer: Tokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    add_bos: bool  # whether `tokenizer.encode` (with special tokens) begins every text with bos
    template_variables: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, pad_token, ...


def make_tokenizer(checkpoint: Checkpoint | ConfigCheckpoint, chat_template: str | None = None) -> ModelTokenizer:
    """Build the tokenizer of a checkpoint, for text and chats; `chat_template` replaces the checkpoint's own."""
    files = load_tokenizer(checkpoint)
    return ModelTokenizer(
        files.tokenizer,
        chat_template=files.chat_template if chat_template is None else chat_template,
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        add_bos=files.add_bos,
        template_variables=files.template_variables,
    )


def load_tokenizer(checkpoint: Checkpoint | ConfigCheckpoint) -> TokenizerFiles:
    if checkpoint.format == "gguf":
        from chairlift.loading.gguf.checkpoint import GGUFCheckpoint
        from chairlift.loading.gguf.tokenizer import gguf_tokenizer

        assert isinstance(checkpoint, GGUFCheckpoint)
        return gguf_tokenizer(checkpoint.file)
    return _folder_tokenizer(checkpoint.path)


def _folder_tokenizer(folder: Path) -> TokenizerFiles:
    settings = read_optional_json_object(folder / "tokenizer_config.json")
    named = read_optional_json_object(folder / "special_tokens_map.json") | settings
    tokens = {name: named.get(name) for name in _SPECIAL}  # texts, or mappings with `content`
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    special = {name: text for name, text in texts.items() if isinstance(text, str)}
    file = folder / "tokenizer.json"
    if file.exists():
        with refuse_damage(file):
            size = file.stat().st_size
            if size > MAX_TOKENIZER_BYTES:
                raise ValueError(f"it has {size} bytes, more than the limit ({MAX_TOKENIZER_BYTES})")
            tokenizer = Tokenizer.from_file(str(file))
    else:
        tokenizer = _from_transformers(folder)
    # The file may contain truncation and padding settings of the training, which would change prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    adds_bos = _replaced_post_processor(folder, settings) if file.exists() else None
    if adds_bos is not None:
        add_special_tokens(tokenizer, bos=special.get("bos_token") if adds_bos else None, eos=None)
    template = _chat_template(folder, settings)
    with refuse_damage(file):  # damage may only show on use
        return tokenizer_files(tokenizer, template, special)


def _replaced_post_processor(folder: Path, settings: dict[str, Any]) -> bool | None:
    """Whether the class of the tokenizer adds a beginning of text itself; None if it does what tokenizer.json says.

    The rule is that of transformers: what tokenizer.json says counts, and add_bos_token and add_eos_token of
    tokenizer_config.json do not. Two classes replace it.
    """
    config = read_optional_json_object(folder / "config.json")
    model_type, declared = config.get("model_type"), settings.get("tokenizer_class") or config.get("tokenizer_class")
    if declared is None:
        return next((adds for adds, types in _MODEL_TYPES.items() if model_type in types), None)
    adds_bos = _REPLACING_CLASSES.get(str(declared).removesuffix("Fast"))
    if adds_bos is None:
        return None
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    registered = TOKENIZER_MAPPING_NAMES.get(str(model_type))
    return None if registered == "TokenizersBackend" else adds_bos  # then that class is taken, not the declared one


def tokenizer_files(tokenizer: Tokenizer, chat_template: str | None, special: dict[str, str]) -> TokenizerFiles:
    bos = special.get("bos_token")
    first = tokenizer.encode("").tokens[:1]
    return TokenizerFiles(
        tokenizer=tokenizer,
        chat_template=chat_template,
        bos_token=bos,
        eos_token=special.get("eos_token"),
        add_bos=bos is not None and first == [bos],
        template_variables=special,
    )


def add_special_tokens(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode` add `bos` and `eos`, where given."""
    present = {token: tokenizer.token_to_id(token) for token in (bos, eos) if token is not None}
    pieces = [bos, "$A", eos]
    tokenizer.post_processor = TemplateProcessing(
        single=[piece for piece in pieces if piece == "$A" or present.get(piece or "") is not None],
        special_tokens=[(token, index) for token, index in present.items() if index is not None],
    )


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        with refuse_damage(file):
            return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    if template is None:  # It may belong to the processor of texts and images.
        template = read_optional_json_object(folder / "chat_template.json").get("chat_template")
    if template is not None and not isinstance(template, str):
        raise CorruptCheckpoint(f"{folder / 'tokenizer_config.json'}: chat_template must be a text or a list")
    return template


def _from_transformers(folder: Path) -> Tokenizer:
    """Older checkpoints have only a SentencePiece model or a vocabulary and merges: let transformers convert."""
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        backend = converted.backend_tokenizer
    except Exception as error:
        raise UnsupportedModel(
            f"{folder}: has no tokenizer.json, and transformers cannot build one ({error}); "
            "add the tokenizer files of the original model"
        ) from error
    assert isinstance(backend, Tokenizer)
    return backend


@contextmanager
def refuse_damage(file: Path) -> Iterator[None]:
    """Turn exceptions and panics of the tokenizers library into CorruptCheckpoint."""
    try:
        yield
    except ChairliftError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise CorruptCheckpoint(f"{file}: no tokenizer can be made of it ({error}): fetch it again") from error
