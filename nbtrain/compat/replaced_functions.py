"""Which functions of other packages are replaced, who listens to each of them, why, and in which order.

`intercept.py` does it. The table is shown in docs/internals/replaced_functions.md; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nbtrain.compat import deepspeed as ds
from nbtrain.compat import dtensor, groups, loaders, training_libraries
from nbtrain.compat import horovod as hvd

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "new_group",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "all_gather_single",
    "reduce_scatter_single",
)  # fmt: skip
"""functions of torch.distributed that need every rank. Not every torch has the last two."""
WRAP = ("torch._functorch.eager_transforms._wrap_tensor_for_grad", "torch._functorch.vmap._add_batch_dim")
"""Functions through which a tensor comes that `torch.func.grad` differentiates, and one that `vmap` maps over."""
FUNCTIONAL_CALL = "torch.nn.utils.stateless._functional_call"
"""What both of torch's `functional_call` come to, with the weights in one dict."""


@dataclass(frozen=True)
class Row:
    """One function, or several that are replaced alike: then `names` fill the `{}` of its paths."""

    path: str
    listeners: Mapping[str, str]
    """name → why it listens; outermost first"""
    also: tuple[str, ...] = ()
    """other paths of the same function"""
    names: tuple[str, ...] = ()
    imported: bool = False
    """cells import it by name"""
    maybe: bool = False
    """not every version of the package has it"""
    added: bool = False
    """the package has no such function: it is what the listener makes"""
    static: bool = False
    """it is a static method"""
    of_class: bool = False
    """it is a class method"""
    stays: bool = False
    """on a rank it is in place between two messages, too: nothing of nbtrain's own calls it"""

    def paths(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """(path, other paths) of each function"""
        for name in self.names or ("",):
            yield self.path.format(name), tuple(other.format(name) for other in self.also)


TABLE: tuple[Row, ...] = (
    Row(
        "torch.autograd.backward",
        {
            "accumulation": "gradients of a group that were cleared by hand are missed before anything adds to them",
            "pipeline": "a graph ends where a stage begins: which loss a backward starts from is noted, and what "
            "cannot be answered is refused",
            "pieces": "a loss that is made of parameters in pieces alone is put together",
            "step": "the strategy, accumulation and loss scaling do their part; a backward cut short is forgotten",
            "precision": "layers that are computed again make tensors in the model's 16 bits",
        },
        imported=True,
    ),
    Row(
        "torch.autograd.grad",
        {
            "step": "what it gives is this rank's own: added to an averaged gradient, that is averaged again; used "
            "otherwise, that is said",
            "pipeline": "gradients by name are refused, and no parameter gets one meanwhile",
            "pieces": "by weights in pieces: it is asked of what is gathered, and each rank gets its part of the mean",
            "deepspeed": "what DeepSpeed cannot follow is said in words",
        },
        imported=True,
    ),
    Row(
        "torch.utils.checkpoint.checkpoint",
        {"divided": "without re-entering autograd: its end would be taken for that of the backward around it"},
        imported=True,
    ),
    Row(
        FUNCTIONAL_CALL,
        {
            "pipeline": "a model in stages is not called with other weights: refused",
            "pieces": "a model in pieces is called with the weights given, without what gathers its own",
            "deepspeed": "stage 3 gathers a model's own weights: others are said to be refused",
        },
    ),
    Row(
        "{}",
        {"pieces": "what is wrapped has no class, by which functions of pieces are told: it is complete from there on"},
        names=WRAP,
    ),
    Row(
        "torch.nn.utils.{}",
        {"step": "a strategy may know the norm better; between accumulated batches nothing is clipped"},
        also=("torch.nn.utils.clip_grad.{}",),
        names=("clip_grad_norm_", "clip_grad_value_"),
        imported=True,
    ),
    Row(
        "torch.nn.utils.{}",
        {"accumulation": "between accumulated batches nothing is clipped: gradients may be held back till then"},
        names=("clip_grads_with_norm_", "get_total_norm"),
        imported=True,
    ),
    Row(
        "torch.amp.GradScaler.scale",
        {
            "step": "refused where the strategy scales losses by itself, and with --accumulate",
            "scaling": "a loop that scales its losses is left alone by 16-mixed",
        },
    ),
    Row("torch.amp.GradScaler.step", {"step": "a step that is passed over has ended, too"}),
    Row(
        "torch.optim.Optimizer.zero_grad",
        {
            "accumulation": "nothing is cleared between accumulated batches",
            "scaling": "an overflow of gradients that are no more is forgotten",
            "lost": "gradients of an earlier cell are not missed any more",
        },
    ),
    Row(
        "torch.nn.Module.zero_grad",
        {
            "accumulation": "nothing is cleared between accumulated batches",
            "lost": "gradients of an earlier cell are not missed any more",
        },
    ),
    Row(
        "torch.optim.lr_scheduler.LRScheduler.step",
        {
            "accumulation": "the K-th call only, or one for an epoch; of every class of schedules",
            "lines": "of ReduceLROnPlateau: by the ranks' mean, or their learning rates would part",
        },
    ),
    Row(
        "torch.{}",
        {"in_cell_models": "models that the cell makes, or copies, are set up"},
        names=("optim.Optimizer.__init__", "optim.Optimizer.add_param_group", "nn.Module.__setstate__"),
    ),
    Row(
        "torch.nn.Module.__call__",
        {
            "record": "pipeline writes down what a forward calls",
            "precision": "what a model computes in, where that is not 32 bits",
        },
    ),
    Row(
        "torch.autograd.Function.apply",
        {
            "record": "what a function with a backward of its own does inside says nothing of its gradient",
            "deepspeed": "what stage 3 has in pieces is gathered for it: torch asks no class of tensors about it",
        },
        of_class=True,
    ),
    Row(
        "torch.Tensor.{}",
        {"hooks": "where ranks average gradients, it would see this rank's own: refused, or said once"},
        names=("register_hook", "register_post_accumulate_grad_hook"),
    ),
    Row(
        "torch.Tensor.{}",
        {"weight_draws": "what is drawn for a weight is the same on every rank, and what one process draws"},
        names=(
            *("normal_", "uniform_", "random_", "bernoulli_"),
            *("exponential_", "log_normal_", "cauchy_", "geometric_"),
        ),
    ),
    Row(
        "torch.{}",
        {"weight_draws": "the same: these draw for a tensor of their own, of a weight's shape, or written into it"},
        names=("nn.init.orthogonal_", "nn.init.sparse_", "rand_like", "randn_like", "randint_like"),
        imported=True,
    ),
    Row("torch.Tensor.retain_grad", {"scaling": "its gradient, too, is divided by the scale"}),
    Row(
        "torch.Tensor.__deepcopy__",
        {"low_precision": "a copy of weights in 16 bits is known for one"},
        also=("torch.nn.Parameter.__deepcopy__",),
    ),
    Row("torch.Tensor.__reduce_ex__", {"xla": "who reads a file may have no XLA: tensors are saved as of the CPU"}),
    Row(
        "torch.distributed.tensor.DTensor.{}",
        {"values": "what stands for a view is shown as one"},
        names=("__repr__",),
    ),
    Row(
        "torch.distributed.tensor.DTensor.data",
        {"values": "each rank takes its part of what is put there; torch would drop it"},
    ),
    Row(
        dtensor.FUNCTION,
        {"values": "by pieces, on the whole, or refused: as is known of the function"},
        static=True,
    ),
    Row(loaders.BATCHES, {"loaders": "batches are dealt out to the ranks"}),
    Row(
        "torch.utils.data.DataLoader.{}",
        {"loaders": "counted, and dealt out in an order that all ranks share"},
        names=("__iter__", "__len__"),
    ),
    Row(
        f"{loaders.ITERATOR}.{{}}",
        {"loaders": "seeds of workers differ by rank; batches are counted and go to the rank's device"},
        names=("__init__", "__next__"),
    ),
    Row("torch.utils.data.dataset.randperm", {"loaders": "random_split splits alike on all ranks"}, maybe=True),
    Row(
        "torch.distributed.{}",
        {
            "subset": "refused in a cell that runs on some ranks only",
            "collective_guard": "raises when ranks enter different collectives, instead of hanging",
        },
        also=("torch.distributed.distributed_c10d.{}",),
        names=COLLECTIVES,
        imported=True,
        maybe=True,
    ),
    Row("torch.distributed.distributed_c10d.Work.wait", {"collective_guard": "waiting counts as communication"}),
    Row(
        "torch.distributed.init_process_group",
        {"group": "a script under none is given the ranks' own group, or the one it asks for in its place"},
        also=("torch.distributed.distributed_c10d.init_process_group",),
        imported=True,
        maybe=True,
    ),
    Row(groups.MAKE, {"group": "the sockets of every group are known, and its threads are patient"}),
    Row("torch.save", {"saving": "one file, written once"}, also=("torch.serialization.save",), imported=True),
    Row(
        "{}.save_pretrained",
        {"saving": "full weights, written once"},
        names=("transformers.modeling_utils.PreTrainedModel", "peft.peft_model.PeftModel"),
    ),
    Row("torch.nn.SyncBatchNorm.forward", {"lines": "works on the CPU, too"}),
    Row(
        "torch.compile",
        {"deepspeed": "while DeepSpeed is imported: it would compile kernels of its Muon, for ten seconds"},
    ),
    Row(
        "torch.nn.functional.linear",
        {"deepspeed": "stage 3 computes it by a function of its own, while its cells run"},
    ),
    Row(
        "{}",
        {
            "deepspeed": "ops that were compiled before are loaded, or the line that compiles them is named; one for a "
            "collective that training does not use is left out"
        },
        names=(ds.JIT_LOAD, ds.BUILD_SHM),
    ),
    Row(
        ds.EMPTY_PARAMETER,
        {"deepspeed": "a parameter in pieces has the shape of the whole and reads as NaN, instead of being empty"},
    ),
    Row(ds.CUT_TO_BLOCKS, {"deepspeed": "gradients are read from the disk to where they belong"}),
    Row(
        "{}",
        {"deepspeed": "weights that have been compared are not sent again while an engine is made"},
        names=(ds.SEND_WEIGHTS, ds.SEND_WEIGHT),
    ),
    Row(
        hvd.START,
        {
            "brought": "refused under another strategy than horovod: no rank would find the others",
            "horovod": "a cell's own hvd.init() goes on with the ranks there are",
        },
    ),
    Row(hvd.WAIT, {"horovod": "waiting can be interrupted, and does not take a processor"}),
    Row(
        "{}",
        {"brought": "refused under another strategy than none; made in the notebook it knows one process"},
        names=(
            *(f"{one.path}.{name}" for one in training_libraries.CLASSES for name in ("__init__", *one.uses)),
            *(training_libraries.DEEPSPEED, training_libraries.HOROVOD),
        ),
        maybe=True,
    ),
    Row(
        "{}",
        {"brought": "both count processes: told that ranks are on the CPU, or refused where they find one"},
        names=(f"{training_libraries.SETTINGS}.__post_init__", f"{training_libraries.STATE}.__init__"),
        maybe=True,
    ),
    Row(
        f"{training_libraries.LAUNCHERS}.{{}}",
        {"brought": "processes of its own, beside the ranks: says what to write"},
        also=("accelerate.{}",),
        names=("notebook_launcher", "debug_launcher"),
        maybe=True,
    ),
    Row(
        "torch.multiprocessing.{}",
        {"brought": "processes of its own, beside the ranks: says what to write"},
        also=("torch.multiprocessing.spawn.{}",),
        names=("start_processes",),
        imported=True,
    ),
    Row("comm.create_comm", {"widgets": "what a widget says goes to the notebook's page"}, stays=True),
    Row("warnings.showwarning", {"anomalies": "torch's traceback of a forward is shown from the cell's line on"}),
    Row("bdb.Bdb.set_trace", {"breakpoints": "every debugger asks in the notebook's input line"}, stays=True),
)
