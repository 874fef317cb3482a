"""Small ONNX models of texts, and their tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
TOKENS = ["<pad>", "<s>", "<unk>", *LETTERS]
TABLE = np.random.default_rng(0).normal(size=(len(TOKENS), 6)).astype(np.float32)
TYPE = np.random.default_rng(1).normal(size=(2, 6)).astype(np.float32)


def write_tokenizer(path: Path, cut: int | None = 8, *, start: bool = True, **padding: Any) -> Path:
    """A token per letter, after <s> if `start`."""
    made = Tokenizer(models.WordLevel({token: n for n, token in enumerate(TOKENS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if start:
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    if cut:
        made.enable_truncation(cut)
    if padding:
        made.enable_padding(**padding)
    made.save(str(path))
    return path


def write_model(
    path: Path,
    *,
    kind: int = TensorProto.INT64,
    made: int = TensorProto.FLOAT,
    inputs: tuple[str, ...] = ("input_ids", "attention_mask"),
    shape: tuple[Any, ...] = ("N", "L"),
    pooled: bool = False,
    masked: bool = True,
    opset: int = 17,
) -> Path:
    """The row of TABLE of each token, plus TYPE[0] with `token_type_ids`: (N, L, 6), or `pooled` their maximum (N, 6).

    As by attention, the tokens that the mask hides are changed, unless not `masked`: by 100, if `pooled` by -100.
    """
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["one", "mask"], ["hidden_NL"]),
        helper.make_node("Reshape", ["hidden_NL", "column"], ["hidden"]),
        helper.make_node("Mul", ["hidden", "hundred"], ["off"]),
        helper.make_node("Sub" if pooled else "Add", ["rows", "off"], ["tokens"]),
    ]
    last = "tokens"
    if "token_type_ids" in inputs:
        nodes += [
            helper.make_node("Gather", ["types", "token_type_ids"], ["typed"]),
            helper.make_node("Add", ["tokens", "typed"], ["both"]),
        ]
        last = "both"
    if pooled:
        nodes.append(helper.make_node("ReduceMax", [last], ["best"], axes=[1], keepdims=0))
        last = "best"
    nodes.append(helper.make_node("Cast", [last], ["made"], to=made))
    arrays = {
        "table": TABLE,
        "types": TYPE,
        "one": np.float32(1),
        "hundred": np.float32(100 if masked else 0),
        "column": np.array([0, -1, 1]),
    }
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, kind, shape) for name in inputs],
        [helper.make_tensor_value_info("made", made, None), helper.make_tensor_value_info("rows", 1, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path
