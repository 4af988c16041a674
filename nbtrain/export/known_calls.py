"""What functions and methods of libraries do, by their names: change, copy, write files, draw and seed."""

from __future__ import annotations

import ast
from typing import Any

SHOWS = frozenset({"print", "display", "help", "dir", "type", "len", "repr", "plt", "show", "head", "describe", "info"})
"""calls of these change nothing"""
COPIES = frozenset(
    {
        "mean", "sum", "item", "tolist", "clone", "copy", "deepcopy", "max", "min", "std", "var", "argmax",
        "argmin", "abs", "exp", "log", "sqrt", "size", "numel", "dim", "nelement", "get_device", "element_size",
        "count", "index", "format", "join", "strip", "split", "lower", "upper", "startswith", "endswith", "replace",
        "is_floating_point", "eq", "ne", "gt", "lt", "ge", "le", "norm", "all", "any", "unique", "value_counts",
        "nunique", "isna", "round", "softmax", "log_softmax", "sigmoid", "tanh", "relu", "topk", "get_last_lr",
        "extra_repr", "corr", "median", "nonzero", "bincount", "equal", "allclose", "get_lr", "exists", "is_file",
        "is_dir", "read_text", "as_posix", "matmul", "mm", "dot", "add", "mul", "sub", "div", "pow", "cumsum",
        "train_test_split", "stack", "cat", "concatenate", "one_hot",
    }
)  # fmt: skip
"""methods and functions that change nothing, and whose result is new"""
PARTS = frozenset(
    {
        "numpy", "parameters", "named_parameters", "state_dict", "buffers", "named_buffers", "modules",
        "named_modules", "children", "named_children", "get_parameter", "get_submodule", "get_buffer", "detach",
        "view", "reshape", "keys", "values", "items", "get", "flatten", "squeeze", "unsqueeze", "t", "transpose",
        "permute", "contiguous", "expand", "iterrows", "itertuples", "iloc", "loc", "ravel", "view_as", "expand_as",
        "chunk", "narrow", "select", "unbind", "astype", "to_numpy", "type", "data_ptr", "storage", "named_tuples",
        "groupby", "tail", "drop", "__len__",
    }
)  # fmt: skip
"""methods that change nothing, and whose result may be a part of their object"""
CONVERTS = frozenset({"to", "cpu", "cuda", "float", "double", "half", "long", "int", "bool", "bfloat16"})
"""of a tensor they make another one, and whoever calls them on one takes it; a model they change"""
TAKES_IN = frozenset(
    {
        "add", "append", "extend", "insert", "update", "setdefault", "put", "load_state_dict", "add_module",
        "register_module", "register_buffer", "register_parameter", "add_param_group", "add_scalar", "log",
        "log_metric", "appendleft",
    }
)  # fmt: skip
"""methods that change their object, not what they are given"""
IN_PLACE = frozenset(
    {"shuffle", "setattr", "delattr", "next", "update_bn", "heappush", "heappop", "load_model", "unfreeze"}
)
"""functions that change what they are given, whoever takes the result"""
NUMBERS = frozenset(
    {"len", "sum", "int", "float", "str", "bool", "abs", "round", "repr", "type", "id", "hash", "range"}
)
WRITES = frozenset(
    {
        "savefig", "to_csv", "to_parquet", "to_json", "to_pickle", "to_excel", "to_feather", "to_hdf", "to_disk",
        "save", "savez", "savez_compressed", "savetxt", "save_pretrained", "save_model", "save_to_disk",
        "save_weights", "save_image", "save_file", "save_checkpoint", "save_state", "imsave", "imwrite",
        "write_text", "write_bytes", "write_image", "write_html", "tofile", "push_to_hub", "to_onnx", "export_onnx",
    }
)  # fmt: skip
"""functions and methods that write a file"""
DUMPS = frozenset({"json", "pickle", "joblib", "yaml", "dill", "cloudpickle", "marshal"})
"""libraries whose dump writes a file"""
EVERY = frozenset({"torch", "numpy", "random"})
"""libraries that have random numbers of their own"""
OF = {"torchvision": "torch", "torchaudio": "torch", "sklearn": "numpy", "scipy": "numpy", "pandas": "numpy"}
"""library → whose random numbers it draws"""
TORCH_DRAWS = frozenset(
    {
        "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like", "randn_like",
        "randint_like", "random_split", "poisson", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
        "log_normal_", "geometric_", "cauchy_",
    }
)  # fmt: skip
SKLEARN_DRAWS = frozenset({"train_test_split", "shuffle", "resample"})
NO_DRAWS = frozenset(
    {"seed", "default_rng", "Random", "SystemRandom", "RandomState", "Generator", "SeedSequence", "PCG64"}
    | {"getstate", "setstate", "get_state", "set_state"}
)
SEEDS = frozenset({"manual_seed", "seed", "seed_everything", "set_seed"})


def writes_file(node: ast.Call, path: str = "") -> bool:
    last = last_name(node.func)
    if last == "open":
        at = 0 if isinstance(node.func, ast.Attribute) else 1
        modes = [*node.args[at : at + 1], *(word.value for word in node.keywords if word.arg == "mode")]
        return any(isinstance(one, ast.Constant) and set(str(one.value)) & set("wax+") for one in modes)
    if last in ("dump", "safe_dump"):
        return (path or root(node.func)).split(".")[0] in DUMPS
    return last in WRITES


def last_name(func: Any) -> str:
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def root(node: Any) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def seeded_by(path: str, last: str, bare: bool) -> frozenset[str]:
    """Libraries. `bare`: a name alone, which a star import may have brought."""
    if last in ("seed_everything", "set_seed"):
        return EVERY
    library = path.split(".")[0]
    if library in EVERY and ".cuda." not in path:
        return frozenset({library})
    return frozenset({"torch"}) if bare and last == "manual_seed" else frozenset()


def drawn_by(node: ast.Call, path: str, last: str) -> str:
    """The library whose random numbers a call draws; empty: none. `path`: of a library's function."""
    own = {word.arg for word in node.keywords
           if not (isinstance(word.value, ast.Constant) and word.value.value is None)}  # fmt: skip
    if own & {"random_state", "generator", "rng", "seed"}:
        return ""
    if not path:
        if not isinstance(node.func, ast.Attribute):
            return ""
        frames = last == "sample" and {"n", "frac"} & own  # of pandas
        return "numpy" if frames else "torch" if last.endswith("_") and last in TORCH_DRAWS else ""
    library = path.split(".")[0]
    library = OF.get(library, library)
    if path.startswith("sklearn"):
        return "numpy" if last in SKLEARN_DRAWS or last.startswith("make_") else ""
    if library == "torch":
        return library if last in TORCH_DRAWS else ""
    if path.startswith("numpy.random."):
        unseeded = last in ("default_rng", "RandomState") and not node.args
        return library if last not in NO_DRAWS or unseeded else ""
    return library if library == "random" and last not in NO_DRAWS else ""
