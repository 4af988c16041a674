"""What is run with other versions of torch and its kin (`make compat TORCH=… PYTHON=…`), and with every `make test`.

The environment there is lean: nbtrain and what it needs, pytest and jupyter-client. A strategy whose package is not
installed is left out, and said.
"""
