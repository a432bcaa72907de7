"""What a model's layers mean for its training: which of them make a batch learn differently when it is divided."""

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# All that can keep running statistics.
NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def properties_of(model: nn.Module) -> list[str]:
    """`dropout`, if a layer draws which activations to drop; `batch-norm`, if a layer normalises over the batch."""
    layers = list(model.modules())
    found = {
        "batch-norm": any(isinstance(layer, BATCH_NORMS) for layer in layers),
        "dropout": any(isinstance(layer, DROPOUTS) and layer.p > 0 for layer in layers),
    }
    return [name for name, has in found.items() if has]
