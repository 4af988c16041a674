"""What the strategies for Lightning's Trainer say where there is no notebook."""

from __future__ import annotations

import pytest

from nbtrain.base.errors import UsageError

L = pytest.importorskip("lightning", reason="lightning is not installed")


@pytest.mark.filterwarnings("ignore")
def test_in_a_script_a_sentence_names_lightnings_own_strategy() -> None:
    from nbtrain.annexes.frameworks.lightning import Strategy

    with pytest.raises(UsageError, match=r"'nbtrain_fsdp' is for an ordinary cell .+ In a script.+: strategy='ddp'"):
        L.Trainer(accelerator="cpu", devices=2, strategy=Strategy("fsdp --wrap Block"), logger=False)
