"""`regraft version create`: create a version folder from an existing model or for vectors from outside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from index.errors import InvalidArgument
from index.version_folder.card import parse_preprocess
from regraft.terminal.answers import answer, out
from regraft.terminal.extras import needs

if TYPE_CHECKING:
    from index.creation.create import Source
    from index.version import Card, Preprocess

PREPROCESS = ("preprocess", "size", "resize", "stretch", "mode", "interpolation", "mean", "std")
API = ("model", "key", "shorten", "batch_size", "requests_per_minute", "tokens_per_minute", "price", "encoding")
PROMPTS = ("query_prompt", "item_prompt")
TOKENS = ("tokenizer", "max_tokens")
LEGAL = {
    "dim": ("space", "curvature"),
    "onnx": ("space", "curvature", "pool", "output", *PREPROCESS, *TOKENS, *PROMPTS),
    "timm": ("space", "curvature", "weights"),
    "torchvision": ("space", "curvature", "weights"),
    "hf": ("space", "curvature", "pool"),
    "open_clip": ("space", "weights"),
    "api": ("space", "dim", *API, *PROMPTS),
}
"""Option that chooses the source of a version -> the options that it may be combined with."""
EXTRA = {"api": "worker", "dim": "worker", "onnx": "worker", "open_clip": "open-clip"}
"""Option that chooses the source -> the extra that must be installed; by default `models`."""


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the version.")],
    dim: Annotated[
        int | None, typer.Option("--dim", "--dimension", help="Embeddings from outside, of this dimension.")
    ] = None,
    api: Annotated[
        str | None,
        typer.Option(
            "--api", metavar="URL", help="An OpenAI-compatible embedding API for texts; needs --model and --dim."
        ),
    ] = None,
    onnx: Annotated[
        Path | None,
        typer.Option(
            "--onnx",
            metavar="FILE",
            help="An ONNX model: of images, with --preprocess or --size; or of texts, with --tokenizer.",
        ),
    ] = None,
    timm: Annotated[
        str | None, typer.Option("--timm", metavar="MODEL", help="A timm model, preprocessed by its data_config.")
    ] = None,
    torchvision: Annotated[
        str | None, typer.Option("--torchvision", metavar="MODEL", help="A torchvision model without its classifier.")
    ] = None,
    hf: Annotated[
        Path | None,
        typer.Option("--hf", metavar="FOLDER", help="Folder of a transformers or sentence-transformers model."),
    ] = None,
    open_clip: Annotated[
        str | None,
        typer.Option("--open-clip", metavar="MODEL", help="An open_clip model: a folder, or a name with --weights."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights", metavar="FILE", help="Weights of the model; default: the library's cache or download."
        ),
    ] = None,
    space: Annotated[str | None, typer.Option("--space", help="cosine (default), l2 or lorentz.")] = None,
    curvature: Annotated[
        float | None, typer.Option("--curvature", help="Curvature of a lorentz space, above 0.")
    ] = None,
    preprocess: Annotated[
        Path | None,
        typer.Option(
            "--preprocess",
            metavar="FILE",
            help="JSON: the `preprocess` of a card, timm's data_config, or a preprocessor_config.json.",
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option("--size", metavar="S|HxW", help="Input size of the model in pixels: 224, or 256x128.")
    ] = None,
    resize: Annotated[
        str | None,
        typer.Option(
            "--resize", metavar="S|HxW", help="Resize before the crop: the shorter side, or height and width."
        ),
    ] = None,
    stretch: Annotated[bool | None, typer.Option("--stretch", help="Resize to --size without a crop.")] = None,
    mode: Annotated[str | None, typer.Option("--mode", help="Colour mode: RGB (default) or L.")] = None,
    interpolation: Annotated[
        str | None, typer.Option("--interpolation", help="bilinear (default), bicubic, lanczos or nearest.")
    ] = None,
    mean: Annotated[
        str | None, typer.Option("--mean", metavar="A,B,C", help="Mean of each channel, for pixels from 0 to 1.")
    ] = None,
    std: Annotated[
        str | None,
        typer.Option("--std", metavar="A,B,C", help="Standard deviation of each channel, for pixels from 0 to 1."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="tokenizer.json of a model of texts.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Tokens at which texts are cut; default: as the tokenizer says.")
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option("--pool", help="Pooling of an output (N, tokens, D) or (N, D, H, W): none, mean or cls."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", help="Name of the output, if the model has several.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The provider's name of the model.")] = None,
    key: Annotated[
        str | None, typer.Option("--key-env", metavar="NAME", help="Environment variable with the API's key.")
    ] = None,
    shorten: Annotated[
        bool | None,
        typer.Option("--shorten", help="Request --dim numbers from the API instead of the model's full dimension."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Texts per API request (default 128).")] = None,
    requests_per_minute: Annotated[
        float | None, typer.Option("--requests-per-minute", help="Maximum API requests of a process per minute.")
    ] = None,
    tokens_per_minute: Annotated[
        float | None,
        typer.Option("--tokens-per-minute", help="Maximum tokens that a process sends to the API per minute."),
    ] = None,
    price: Annotated[float | None, typer.Option("--price", help="Price of a million tokens, for estimates.")] = None,
    encoding: Annotated[
        str | None, typer.Option("--encoding", help="Encoding of the API's answers: float or base64.")
    ] = None,
    query_prompt: Annotated[str | None, typer.Option("--query-prompt", help="Text put before each query.")] = None,
    item_prompt: Annotated[str | None, typer.Option("--item-prompt", help="Text put before each item.")] = None,
    into: Annotated[
        Path, typer.Option("--into", metavar="FOLDER", help="Parent folder of the new folder NAME.")
    ] = Path(),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the version folder NAME.")] = False,
) -> None:
    """Create a version folder for `regraft version register`, checked as at registration.

    Give one source: embeddings from outside (--dim), an embedding API (--api), an ONNX file (--onnx), a timm model
    (--timm), a torchvision model (--torchvision), a Hugging Face folder for images, texts or both (--hf), or an
    open_clip model (--open-clip).

    Example: regraft version create api-v1 --dim 1536

    Example: regraft version create api-v2 --api https://api.openai.com/v1 --model text-embedding-3-large --dim 3072

    Example: regraft version create texts --onnx model.onnx --tokenizer tokenizer.json --pool mean

    Example: regraft version create mine --onnx model.onnx --size 224 --resize 256 --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5
    """
    if Path(name).name != name.rstrip("/"):
        raise InvalidArgument(
            f"the name {name!r} must not be a path; --into FOLDER sets the parent folder", pointer="/name"
        )
    options = {option: value for option, value in locals().items() if option not in {"name", "into", "overwrite"}}
    given = {option: value for option, value in options.items() if value is not None}
    kind = _kind(given)
    with needs(EXTRA.get(kind, "models")):
        from regraft.version import Version

        made = Version.create(into / name, _source(kind, given), overwrite=overwrite)
    card = made.card
    answer(
        {
            "folder": made.folder,
            "name": card.name,
            "dim": card.dim,
            "space": card.space,
            "images": bool(card.encoder),
            "texts": bool(card.text),
            "parity": card.metrics.get("parity", {}),
        }
    )
    for line in summary(made.card, made.folder):
        out.print(line)


def summary(card: Card, folder: Path) -> list[str]:
    """A summary of the created version, line by line."""
    entrances = [what for what, there in (("images", card.encoder), ("texts", card.text)) if there]
    reads = f"reads {' and '.join(entrances)}" if entrances else "takes embeddings from outside"
    lines = [f"wrote {folder}: {card.dim} numbers, {card.space['kind']}, {reads}"]
    if card.api is not None:
        lines += _api_summary(card)
    for what, parity in card.metrics.get("parity", {}).items():
        lines.append(
            f"on {parity['inputs']} {what} the ONNX model differs from {parity['source']} by at most "
            f"{parity['largest_difference']:g} (cosine at least {parity['least_cosine']:g})"
        )
    return [*lines, f"next: regraft version register {folder}"]


def _api_summary(card: Card) -> list[str]:
    assert card.api is not None
    probe, url = card.metrics["probe"], card.api.url
    summary = f"{url} was not called, so its answers are unchecked: {probe.get('why')}"
    if probe["checked"]:
        summary = (
            f"{url} embedded {probe['inputs']} texts twice in different orders: dimension and order are right, they "
            f"differ by at most {probe['largest_difference']:.2g} of the largest value; processes check against these"
        )
    key = f", and {card.api.key} with the key" if card.api.key else ""
    return [summary, f"the service and its workers need REGRAFT_EMBEDDING_APIS={url}{key}"]


def _kind(given: Mapping[str, Any]) -> str:
    """The option that chooses the source of the version.

    Raises:
        InvalidArgument: none or several were given, or an option that it may not be combined with.
    """
    kinds = [kind for kind in LEGAL if kind in given and not (kind == "dim" and "api" in given)]
    if len(kinds) != 1:
        found = " and ".join(map(_flag, kinds)) or "none"
        raise InvalidArgument(f"exactly one source is required: {', '.join(map(_flag, LEGAL))}; given: {found}")
    (kind,) = kinds
    for option in given:
        if option != kind and option not in LEGAL[kind]:
            legal = ", ".join(map(_flag, LEGAL[kind]))
            raise InvalidArgument(f"{_flag(option)} cannot be used with --{kind}; legal: {legal}", pointer=f"/{option}")
    return kind


def _flag(option: str) -> str:
    return "--key-env" if option == "key" else f"--{option.replace('_', '-')}"


def _source(kind: str, given: Mapping[str, Any]) -> Source:
    space = {"kind": given.get("space", "cosine")}
    if "curvature" in given:
        space["curvature"] = given["curvature"]
    if kind == "dim":
        from index.creation.supplied import Supplied

        return Supplied(given["dim"], space)
    if kind == "api":
        return _provider(given, space)
    if kind in {"timm", "torchvision"}:
        from training.creation.vision import Timm, Torchvision

        made = Timm if kind == "timm" else Torchvision
        return made(given[kind], given.get("weights"), space)
    if kind == "open_clip":
        from training.creation.open_clip import OpenClip

        return OpenClip(given["open_clip"], given.get("weights"), space)
    if kind == "hf":
        from training.creation.hugging_face import HuggingFace

        return HuggingFace(given["hf"], space, given.get("pool"))
    return _onnx(given, space)


def _onnx(given: Mapping[str, Any], space: Mapping[str, Any]) -> Source:
    """The source of `--onnx`. Raises InvalidArgument for an option of images beside one of texts."""
    output = (given.get("pool", "none"), given.get("output", ""))
    if "tokenizer" not in given:
        if texts := [option for option in ("max_tokens", *PROMPTS) if option in given]:
            raise InvalidArgument(f"{_flag(texts[0])} requires --tokenizer, or --api", pointer=f"/{texts[0]}")
        from index.creation.onnx_file import OnnxFile

        return OnnxFile(given["onnx"], _preprocess(given), space, *output)
    if images := [option for option in PREPROCESS if option in given]:
        raise InvalidArgument(f"{_flag(images[0])} cannot be used with --tokenizer", pointer=f"/{images[0]}")
    from index.creation.onnx_texts import OnnxTexts

    return OnnxTexts(given["onnx"], given["tokenizer"], given.get("max_tokens"), space, *output, _prompts(given))


def _provider(given: Mapping[str, Any], space: Mapping[str, Any]) -> Source:
    """The source of `--api`. Raises InvalidArgument if an option is missing."""
    from index.version import EmbeddingApi
    from regraft.embedding_api import ProviderApi

    for option in ("model", "dim"):
        if option not in given:
            raise InvalidArgument(f"--api requires --{option}", pointer=f"/{option}")
    api = EmbeddingApi(given["api"].rstrip("/"), **{option: given[option] for option in API if option in given})
    return ProviderApi(api, given["dim"], space, _prompts(given))


def _prompts(given: Mapping[str, Any]) -> dict[str, str]:
    return {option.removesuffix("_prompt"): given[option] for option in PROMPTS if option in given}


def _preprocess(given: Mapping[str, Any]) -> Preprocess:
    """The preprocessing, from a file or from options.

    Raises:
        InvalidArgument: both or neither, or an option cannot be parsed.
        InvalidVersionFolder: a value is not legal.
    """
    options = [option for option in PREPROCESS[1:] if option in given]
    if "preprocess" in given:
        if options:
            raise InvalidArgument(f"--{options[0]} cannot be used with --preprocess", pointer=f"/{options[0]}")
        from index.creation.preprocessing import read_preprocess

        return read_preprocess(given["preprocess"])
    if "size" not in given:
        raise InvalidArgument(
            "preprocessing is missing: give --preprocess FILE, or --size with --resize or --stretch, "
            "--interpolation, --mean and --std; or --tokenizer FILE for a model of texts",
            pointer="/preprocess",
        )
    sides = _sides(given["size"], "size")
    value: dict[str, Any] = {"height": sides[0], "width": sides[-1]}
    if "resize" in given:
        value["resize"] = sides[0] if len(sides := _sides(given["resize"], "resize")) == 1 else sides
    value |= {option: given[option] for option in ("stretch", "mode", "interpolation") if option in given}
    value |= {option: _numbers(given[option], option) for option in ("mean", "std") if option in given}
    return parse_preprocess(value, "--size and the like", "")


def _sides(text: str, option: str) -> list[int]:
    if not re.fullmatch(r"\d{1,5}(x\d{1,5})?", text):
        raise InvalidArgument(
            f"--{option} {text!r} must be pixels (224) or height x width (256x128)", pointer=f"/{option}"
        )
    return [int(side) for side in text.split("x")]


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise InvalidArgument(
            f"--{option} {text!r} must be numbers separated by commas", pointer=f"/{option}"
        ) from error
