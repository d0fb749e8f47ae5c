"""Train a deep autoencoder without any learning rate: K-FAC computes rate and momentum, and adapts its damping.

One sees the squared error of reconstructions fall, and the rate that each step found by itself:
    python autoencoder.py --optimizer adam --folder mnist
"""
# mypy: ignore-errors

import argparse
from itertools import pairwise

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from kfac_optim import KFACOptimizer, LevenbergMarquardt, MonteCarlo, QuadraticModel

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", help="of MNIST's parquet files (default: the digits of scikit-learn)")
parser.add_argument("--optimizer", choices=("kfac", "adam"), default="kfac", help="(default: %(default)s)")
parser.add_argument("--lr", type=float, default=0.02, help="of adam alone (default: %(default)s)")
parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
args = parser.parse_args()
torch.manual_seed(args.seed)
if args.folder:
    import datasets  # of Hugging Face, to read parquet files

    images = datasets.load_dataset(args.folder, split="train")["image"]
    pixels, widths = torch.from_numpy(np.stack(list(images))).flatten(1) / 255, (784, 1000, 500, 250, 30)
else:
    pixels, widths = torch.from_numpy(load_digits().data).float() / 16, (64, 128, 64, 32, 6)
widths += widths[-2::-1]
layers = [part for each in pairwise(widths) for part in (nn.Linear(*each), nn.Tanh())]
model = nn.Sequential(*layers[:7], *layers[8:-1])  # neither the code nor the logits are bounded
criterion = nn.BCEWithLogitsLoss(reduction="sum")
if args.optimizer == "kfac":
    adaptive = {"step_size": QuadraticModel(), "adapt_damping": LevenbergMarquardt(), "estimate": MonteCarlo(criterion)}
    periods = {"factor_update_period": 5, "inverse_update_period": 20}
    # The damping is that of the start, and a momentum above 0 says that it is to be computed as well.
    optimizer = KFACOptimizer(model, momentum=0.9, damping=1.0, **adaptive, **periods)
else:
    optimizer = torch.optim.Adam(model.parameters(), args.lr)


def closure():
    optimizer.zero_grad()
    loss = criterion(model(batch), batch) / len(batch)
    loss.backward()
    return loss


for step in range(1, args.steps + 1):
    batch = pixels[torch.randperm(len(pixels))[:2000]]
    optimizer.step(closure)
    if step % 20 == 0 or step == args.steps:
        with torch.no_grad():
            error = (model(pixels[:5000]).sigmoid() - pixels[:5000]).square().sum(1).mean()
        group = {**optimizer.param_groups[0], "learning_rate": 1, **getattr(optimizer, "metrics", dict)()}
        print(f"step {step}: squared error {error:.3f}, rate {group['lr'] * group['learning_rate']:.2g}", flush=True)
