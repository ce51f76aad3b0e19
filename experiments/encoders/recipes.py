"""Recipes that turn the archives of packages into a folder as save_pretrained writes it.

A recipe takes the archives in the order of the table and writes safetensors, a tokenizer and inputs.txt into a folder.
Pickles are read with weights_only, which builds tensors and runs no code.
"""

from __future__ import annotations

import argparse
import pickletools
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from attn_flow.experiments.encoders.inputs import Recipe, antibodies, english, reactions, receptors, russian
from attn_flow.experiments.encoders.installed import smiles_tokenizer
from attn_flow.experiments.encoders.packages import extract
from attn_flow.experiments.encoders.receptors import RESIDUES
from attn_flow.hooks.demo import BRACKETS, word_tokenizer
from attn_flow.hooks.safe_loading import pretrained

HUGGINGFACE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def plain(inside: str, inputs: Recipe) -> Recipe:
    """A folder inside the archive that is in the form of save_pretrained already."""

    def write(archives: Sequence[Path], out: Path) -> None:
        extract(archives[0], {f"{inside}/{name}": name for name in HUGGINGFACE}, out)
        inputs(archives, out)

    return write


def parts(inside: str, names: Sequence[str]) -> Recipe:
    """A zip that several sdists hold slices of."""

    def write(archives: Sequence[Path], out: Path) -> None:
        whole = out / "whole.zip"
        with whole.open("wb") as target:
            for archive, name in zip(archives, names, strict=True):
                extract(archive, {name: "slice"}, out)
                with (out / "slice").open("rb") as source:
                    shutil.copyfileobj(source, target, 1 << 20)
        (out / "slice").unlink()
        extract(whole, {f"{inside}/{name}": name for name in HUGGINGFACE}, out)
        whole.unlink()
        english(archives, out)

    return write


def pickled(
    inside: str, kind: str, prefix: str, tokenizer: Callable[[Path], Any], inputs: Recipe, vocabulary: str
) -> Recipe:
    """A folder with config.json and pytorch_model.bin of a BertModel or AlbertModel, and a tokenizer of our own.

    prefix: of the encoder's names among the weights. vocabulary: the file inside that the tokenizer reads.
    """

    def write(archives: Sequence[Path], out: Path) -> None:
        import transformers

        taken = {f"{inside}/config.json": "config.json", f"{inside}/pytorch_model.bin": "pickle"}
        extract(archives[0], {**taken, vocabulary: "vocabulary"}, out)
        config = getattr(transformers, kind.replace("Model", "Config")).from_json_file(out / "config.json")
        model = getattr(transformers, kind)(config, add_pooling_layer=False)
        _fill(model, _unpickle(out / "pickle"), prefix)
        _save(model, out)
        tokenizer(out).save_pretrained(out)
        (out / "vocabulary").unlink()
        inputs(archives, out)

    return write


def _unpickle(file: Path) -> Any:
    """The content of a pickle, which is removed afterwards."""
    with torch.serialization.safe_globals([argparse.Namespace]):  # fairseq's options: a plain record
        content = torch.load(file, map_location="cpu", weights_only=True)
    file.unlink()
    return content


def _fill(model: nn.Module, weights: dict[str, Tensor], prefix: str) -> None:
    """All weights of the model by name; names it does not have must be heads or buffers."""
    own = model.state_dict()
    renamed = {name.removeprefix(prefix): t.to(torch.float32) for name, t in weights.items() if name.startswith(prefix)}
    missing = sorted(set(own) - set(renamed) - {"embeddings.position_ids", "embeddings.token_type_ids"})
    if missing:
        raise ValueError(f"the pickle has no {', '.join(missing[:3])} (of {len(missing)} missing weights).")
    model.load_state_dict({name: t for name, t in renamed.items() if name in own}, strict=False)


def _save(model: Any, out: Path) -> None:
    model.config.save_pretrained(out)
    save_file(model.state_dict(), out / "model.safetensors", metadata={"format": "pt"})


def smiles(folder: Path) -> Any:
    """A tokenizer of reaction SMILES with the vocabulary of the model."""
    return smiles_tokenizer(folder / "vocabulary")


def residues(folder: Path) -> Any:
    """A tokenizer of amino acids, a token a letter, as AntiBERTy numbers them."""
    return word_tokenizer((folder / "vocabulary").read_text(encoding="utf-8").split(), 512, r"[A-Z]")


def bert_words(folder: Path) -> Any:
    """The tokenizer that the folder holds."""
    from transformers import PreTrainedTokenizerFast

    names = {f"{key}_token": token for key, token in BRACKETS.items()}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "vocabulary"), model_max_length=512, **names)


# fairseq's names and ours, inside a layer of its RoBERTa
FAIRSEQ = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.output.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "output.LayerNorm",
}


def fairseq(checkpoint: str, kinds: Sequence[re.Pattern[str]]) -> Recipe:
    """The RoBERTa of sapiens, renamed from fairseq; its tokens are <s> <pad> </s> <unk>, the amino acids, <mask>."""

    def write(archives: Sequence[Path], out: Path) -> None:
        from transformers import RobertaConfig, RobertaModel

        extract(archives[0], {f"sapiens/models/v1/{checkpoint}": "pickle"}, out)
        saved = _unpickle(out / "pickle")
        options = saved["args"]
        config = RobertaConfig(
            vocab_size=len(RESIDUES) + 5,
            hidden_size=options.encoder_embed_dim,
            num_hidden_layers=options.encoder_layers,
            num_attention_heads=options.encoder_attention_heads,
            intermediate_size=options.encoder_ffn_embed_dim,
            max_position_embeddings=options.max_positions + 2,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
        )
        model = RobertaModel(config, add_pooling_layer=False)
        _fill(model, _rename_fairseq(saved["model"], options.encoder_embed_dim), "")
        _save(model, out)
        names = {"unk": "<unk>", "pad": "<pad>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
        tokens = ["<s>", "<pad>", "</s>", "<unk>", *RESIDUES, "<mask>"]
        word_tokenizer(tokens, options.max_positions, r"[A-Z]", names).save_pretrained(out)
        antibodies(archives, out, kinds)

    return write


def _rename_fairseq(weights: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
    outside = {
        "embed_tokens": "embeddings.word_embeddings",
        "embed_positions": "embeddings.position_embeddings",
        "emb_layer_norm": "embeddings.LayerNorm",
    }
    renamed = {"embeddings.token_type_embeddings.weight": torch.zeros(1, dim)}  # fairseq has none
    for name, tensor in weights.items():
        inside = name.removeprefix("decoder.sentence_encoder.")
        layer = re.match(r"layers\.(\d+)\.(.+)\.(weight|bias)$", inside)
        if layer:
            renamed[f"encoder.layer.{layer[1]}.{FAIRSEQ[layer[2]]}.{layer[3]}"] = tensor
        elif inside.rpartition(".")[0] in outside:
            module, _, kind = inside.rpartition(".")
            renamed[f"{outside[module]}.{kind}"] = tensor
    return renamed


def gguf(inside: str) -> Recipe:
    """A file of llama.cpp, its quantised weights written out as float32; needs the packages gguf and accelerate."""

    def write(archives: Sequence[Path], out: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        if find_spec("gguf") is None or find_spec("accelerate") is None:
            raise ModuleNotFoundError("GGUF files need gguf and accelerate; run `pip install 'attn-flow[encoders]'`.")
        extract(archives[0], {inside: "quantised"}, out)
        model = pretrained(AutoModel, out, gguf_file="quantised", dtype=torch.float32)
        vars(model.config).pop("quantization_config", None)  # its weights are plain now
        _save(model, out)
        pretrained(AutoTokenizer, out, gguf_file="quantised").save_pretrained(out)
        (out / "quantised").unlink()
        english(archives, out)

    return write


def graphs(archives: Sequence[Path], out: Path) -> None:
    """chytorch-rxnmap's weights under the names of `ReactionEncoder`, the shared block once; reactions as inputs."""
    extract(archives[0], {"chytorch/zoo/rxnmap/weights.pt": "pickle"}, out)
    weights = _unpickle(out / "pickle")
    outside = {"atoms_encoder": "elements", "centrality_encoder": "neighbours", "spatial_encoder": "distances"}
    weights_by_name = {}
    for name, tensor in weights.items():
        first, _, rest = name.partition(".")
        if first == "layer":
            weights_by_name[f"layers.0.{rest}"] = tensor
        elif first == "role_encoder":
            weights_by_name[f"roles.{rest}"] = tensor
        elif rest.startswith("layer."):
            weights_by_name[f"molecule_{rest}"] = tensor
        else:
            module, _, kind = rest.partition(".")
            # the first row of distances, -inf, keeps molecules apart; here each is moved by itself
            weights_by_name[f"{outside[module]}.{kind}"] = tensor[1:] if module == "spatial_encoder" else tensor
    save_file({name: t.contiguous() for name, t in weights_by_name.items()}, out / "model.safetensors")
    reactions(archives, out)


def tables(archives: Sequence[Path], out: Path) -> None:
    """TabPFN's checkpoint: (weights, nothing, options)."""
    extract(archives[0], {"tabpfn/models_diff/prior_diff_real_checkpoint_n_0_epoch_42.cpkt": "pickle"}, out)
    weights = _unpickle(out / "pickle")[0]
    names = {name: name.removeprefix("module.").removeprefix("transformer_encoder.") for name in weights}
    weights_by_name = {
        names[name]: t.contiguous() for name, t in weights.items() if not names[name].startswith("criterion")
    }
    save_file(weights_by_name, out / "model.safetensors")


def sceptr(archives: Sequence[Path], out: Path) -> None:
    """SCEPTR's default variant under the names of `ReceptorEncoder`; receptors as inputs."""
    extract(archives[0], {"sceptr/_model_saves/SCEPTR/state_dict.pt": "pickle"}, out)
    stack = "_self_attention_stack."
    names = {f"{stack}_initial_projector.": "embedding.", f"{stack}_standard_stack.{stack}": ""}
    weights_by_name = {}
    for name, tensor in _unpickle(out / "pickle").items():
        for theirs, ours in names.items():
            if name.startswith(theirs):
                weights_by_name[ours + name.removeprefix(theirs)] = tensor.contiguous()
    save_file(weights_by_name, out / "model.safetensors")
    receptors(archives, out)


def silero(archives: Sequence[Path], out: Path) -> None:
    """The BERT of silero-stress, which marks the stress of Russian homographs.

    Its file is a torch package: pickles that name code beside plain files of numbers. Only the numbers are read, which
    are in the order of BERT's parameters, and the strings of the vocabulary, which pickletools lists without running
    anything. Word embeddings are stored in 8 bits with a scale and a zero point.
    """
    from transformers import BertConfig, BertModel

    extract(archives[0], {"silero_stress/data/accentor.pt": "package"}, out)
    with zipfile.ZipFile(out / "package") as content:
        root = content.namelist()[0].partition("/")[0]
        vocabulary = pickled_vocabulary(content.read(f"{root}/accentor_models/accentor"))
        read = lambda i, dtype: torch.frombuffer(bytearray(content.read(f"{root}/.data/{i}.storage")), dtype=dtype)
        model = BertModel(
            BertConfig(
                vocab_size=len(vocabulary),
                hidden_size=312,
                num_hidden_layers=3,
                num_attention_heads=12,
                intermediate_size=600,
                max_position_embeddings=2048,
            ),
            add_pooling_layer=False,
        )
        scale, zero = (read(i, torch.float32) for i in (19, 20))
        with torch.no_grad():
            for i, (name, parameter) in enumerate(model.named_parameters(), start=23):
                is_quantised = name == "embeddings.word_embeddings.weight"
                values = scale * (read(i, torch.int8) - zero) if is_quantised else read(i, torch.float32)
                parameter.copy_(values.view_as(parameter))
    (out / "package").unlink()
    _save(model, out)
    _word_pieces(vocabulary).save_pretrained(out)
    russian(archives, out)


def pickled_vocabulary(pickle: bytes, size: int = 83_830) -> list[str]:
    """The tokens in a pickle, where "vocab" is followed by pairs of a token and its number."""
    tokens: dict[Any, str] = {}
    memo: dict[Any, str] = {}  # a string that was written before is written as its number in the memo
    last, is_vocabulary = "", False
    for operation, argument, _ in pickletools.genops(pickle):
        if isinstance(argument, str):
            last = argument
            is_vocabulary = is_vocabulary or last == "vocab"
        elif operation.name.endswith("BINPUT"):
            memo[argument] = last
        elif operation.name.endswith("BINGET"):
            last = memo[argument]
        elif is_vocabulary and operation.name.startswith("BININT"):
            tokens[argument] = last
            if len(tokens) == size:
                return [tokens[i] for i in range(size)]
    raise ValueError(f"the package has a vocabulary of {len(tokens)} tokens, expected {size}.")


def _word_pieces(vocabulary: list[str]) -> Any:
    """BERT's own tokenizer, which tells capital letters from small ones."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(vocabulary)}
    pieces = BertWordPieceTokenizer(vocab=ids, lowercase=False, strip_accents=False)
    pieces.add_special_tokens(vocabulary[-2:])  # the marks around a homograph
    names = {f"{role}_token": token for role, token in BRACKETS.items()}
    return PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, model_max_length=2048, **names)
