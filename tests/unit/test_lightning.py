"""mpkit's optimizers inside Lightning's Trainer: bf16-mixed with clipping, against the same loop written by hand."""

import copy

import pytest
import torch
from torch import nn

from mpkit import optimizers as opt
from mpkit.boost import FreezeOpt

lightning = pytest.importorskip("lightning.pytorch", reason="pip install lightning: its Trainer is what is tested")

MAKERS = {
    "Momentum": lambda p: opt.Momentum(p, 0.1, 0.9),
    "Adam": lambda p: opt.Adam(p, 0.01),
    "LARS": lambda p: opt.LARS(opt.Momentum(p, 0.1, 0.9)),
    "FreezeOpt": lambda p: FreezeOpt(opt.Momentum(p, 0.1, 0.9)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("kind", MAKERS)
def test_bf16_mixed_with_clipping_trains_as_by_hand(kind, clip, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    by_hand = copy.deepcopy(net)
    batches = [(torch.randn(6, 4), 20 * torch.randn(6, 1)) for _ in range(4)]

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, _index):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return MAKERS[kind](list(self.net.parameters()))

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    clipping = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": clip}
    where = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
    trainer = lightning.Trainer(precision="bf16-mixed", max_epochs=1, **off, **clipping, **where)
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))

    params = list(by_hand.parameters())
    optimizer = MAKERS[kind](params)
    clip_ = nn.utils.clip_grad_norm_ if clip == "norm" else nn.utils.clip_grad_value_
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(by_hand(x), y)
        loss.backward()
        clip_(params, 0.5)
        optimizer.step()
    for trained, want in zip(net.parameters(), params):
        assert torch.equal(trained, want)
