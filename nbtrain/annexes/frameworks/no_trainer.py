"""In the place of a Trainer of nbtrain's own, for one release: a sentence for code that asks for it."""

from nbtrain.base.errors import UsageError

TODAY = {
    "Trainer": "L.Trainer(strategy='nbtrain_ddp', devices=4)",
    "Module": "L.LightningModule",
    "DataModule": "L.LightningDataModule",
    "callbacks": "lightning.pytorch.callbacks",
}
"""what was there → Lightning's"""

raise UsageError(
    "nbtrain has no Trainer of its own any more, Lightning's runs on the same ranks: `pip install lightning`, `import "
    f"lightning as L`, and {', '.join(f'{today} for {name}' for name, today in TODAY.items())}"
)
