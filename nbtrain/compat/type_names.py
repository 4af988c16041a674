"""Classes of others, as `module.Class`: told by name, so that nothing is imported to know them.

Many stand in private modules, or are private themselves, and other versions have them elsewhere: then both names are
here, and one that nobody has does no harm. Public classes stand where their private relatives do.
"""

from __future__ import annotations

LOCKS = (
    "_thread.lock", "_thread.RLock", "threading._RLock", "threading.Condition", "threading.Event",
    "threading.Semaphore", "threading.Barrier",
)  # fmt: skip
THREADS = (
    "threading.Thread", "concurrent.futures._base.Executor", "concurrent.futures._base.Future",
    "multiprocessing.pool.Pool",
)  # fmt: skip
"""Threads, and what waits for them."""
PER_THREAD = ("_thread._local",)
SHARED_WITH_CHILDREN = (
    "multiprocessing.synchronize.SemLock", "multiprocessing.synchronize.Condition",
    "multiprocessing.synchronize.Event", "multiprocessing.sharedctypes.SynchronizedBase",
    "multiprocessing.queues.Queue", "multiprocessing.queues.SimpleQueue",
    "multiprocessing.connection._ConnectionBase", "multiprocessing.process.BaseProcess",
)  # fmt: skip
QUEUES = ("queue.Queue", "_queue.SimpleQueue")
"""Between threads."""
MODELS_IN_PIECES = (
    "torch.distributed.fsdp.FSDPModule", "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "deepspeed.runtime.engine.DeepSpeedEngine",
)  # fmt: skip
TENSORS_IN_PIECES = ("torch.distributed.tensor.DTensor", "torch.distributed.tensor._api.DTensor")
DATABASES = (
    "sqlite3.Connection", "sqlite3.Cursor", "sqlalchemy.engine.base.Engine", "sqlalchemy.engine.base.Connection",
    "sqlalchemy.orm.session.Session", "psycopg2.extensions.connection", "psycopg.Connection",
    "duckdb.DuckDBPyConnection", "_duckdb.DuckDBPyConnection",
)  # fmt: skip
OPEN_FILES = (
    "tempfile._TemporaryFileWrapper", "zipfile.ZipFile", "tarfile.TarFile", "gzip.GzipFile", "bz2.BZ2File",
    "lzma.LZMAFile", "h5py._hl.base.HLObject",
    "_io.TextIOWrapper", "_io.BufferedReader", "_io.BufferedWriter", "_io.BufferedRandom", "_io.FileIO",
)  # fmt: skip
OPEN_ARCHIVES = ("numpy.lib.npyio.NpzFile", "numpy.lib._npyio_impl.NpzFile")
"""What `numpy.load` returns for a file of several arrays."""
CSV = ("_csv.reader", "_csv.writer", "_csv.Reader", "_csv.Writer")
LOADER_ITERATORS = ("torch.utils.data.dataloader._BaseDataLoaderIter",)
EVENT_LOOPS = ("asyncio.events.AbstractEventLoop", "_asyncio.Future", "_asyncio.Task", "asyncio.futures.Future")
"""And what waits in them."""
CONTEXT_VARIABLES = (
    "_contextvars.ContextVar", "_contextvars.Context", "_contextvars.Token", "ContextVar", "Context", "Token",
    "builtins.ContextVar", "builtins.Context", "builtins.Token",
)  # fmt: skip
ADDRESSES = (
    "_ctypes._Pointer", "_ctypes.CFuncPtr", "ctypes.CDLL", "_ctypes.PyCFuncPtrType", "_ctypes.PyCStructType",
    "_ctypes.PyCArrayType", "_ctypes.PyCPointerType",
)  # fmt: skip
"""What ctypes makes of memory and libraries."""
SCRIPTED = (
    "torch.jit._script.ScriptModule", "torch.jit.ScriptFunction", "torch.jit.torch.jit.ScriptFunction",
    "torch._C.ScriptFunction",
)  # fmt: skip
