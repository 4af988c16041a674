"""Moves each kind of object: how it is looked at, made on the other side, and edited in place.

    dispatch.py               which kind an object is
    base.py                   what a kind is; atoms, references; what a kind sees of sender and receiver
    containers.py             lists, dicts, sets, tuples; long strings, bytes and tuples of values
    container_subclasses.py   those with attributes of their own: ordered dicts, classes below them
    functions.py              functions of the notebook, and what wraps them
    classes.py                its classes
    gradient_hooks.py         hooks on the gradients of tensors
    objects.py                instances; whatever only its own pickle can move
    changed_class.py          the class of an object that both sides know
    not_sendable.py           what belongs to one process; its streams and its shell
    remedies.py               why an object cannot travel, and what to write instead
    arrays.py                 NumPy arrays
    tensors.py                tensors and the memory they show
    split_tensors.py          those whose content is in pieces here
    checksum.py               numbers that tell whether content changed; bulk_compare.py: of many small tensors at once
    random_generators.py      random generators
    modules_and_optimizers.py modules, optimizers, schedulers, loaders
    python_module_state.py    what was changed in modules of Python

None in place of a kind: an object travels as it is, by value or by name.
"""
