"""Classify images on one process or on several, by DistributedDataParallel and a rate that falls along a cosine.

One sees loss and accuracy on the test images after each epoch, the same on any number of processes but for rounding:
    torchrun --nproc-per-node 2 images.py --folder cifar10 --optimizer sgd
"""
# mypy: ignore-errors

import argparse

import datasets
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import initialize

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", help="of MNIST's or CIFAR-10's parquet files (default: the digits of scikit-learn)")
parser.add_argument("--optimizer", choices=("kfac", "sgd"), default="kfac", help="(default: %(default)s)")
parser.add_argument("--lr", type=float, help="at the start (default: kfac 0.01, sgd 0.03)")
parser.add_argument("--epochs", type=int, default=10, help="(default: %(default)s)")
parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
args = parser.parse_args()
torch.manual_seed(args.seed)
place = initialize()  # forms the process group under torchrun, and does nothing alone
if args.folder:
    parts = [datasets.load_dataset(args.folder, split=split) for split in ("train", "test")]
    images = [image for part in parts for image in part[min(part.column_names)]]  # the column of images, not "label"
    pixels = torch.from_numpy(np.stack(images)).float().view(len(images), *images[0].size, -1).permute(0, 3, 1, 2) / 255
    labels, held_out = torch.tensor([label for part in parts for label in part["label"]]), len(parts[1])
else:
    order, held_out = torch.randperm(1797), 360
    pixels, labels = (torch.from_numpy(each)[order] for each in load_digits(return_X_y=True))
    pixels = pixels.view(-1, 1, 8, 8).float() / 16
layers, widths = [], (pixels.shape[1], 16, 16, 32, 32, 64, 64)
for i in range(6):
    layers += [nn.Conv2d(widths[i], widths[i + 1], 3, stride=1 + i % 2, padding=1), nn.ReLU()]
    nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")  # from torch's own SGD would not learn
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
model = nn.parallel.DistributedDataParallel(model) if place.world_size > 1 else model
make, rate = (KFACOptimizer, 0.01) if args.optimizer == "kfac" else (torch.optim.SGD, 0.03)
optimizer = make(model.parameters(), lr=args.lr or rate, momentum=0.9, weight_decay=5e-4)
sampler = DistributedSampler(TensorDataset(pixels[:-held_out], labels[:-held_out]), place.world_size, place.rank)
batches = DataLoader(sampler.dataset, 128 // place.world_size, sampler=sampler, drop_last=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(batches))
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        logits = torch.cat([model(x) for x in pixels[-held_out:].split(1000)])
    if place.rank == 0:
        loss, right = nn.functional.cross_entropy(logits, labels[-held_out:]), logits.argmax(1) == labels[-held_out:]
        print(f"epoch {epoch + 1}: test loss {loss:.4f}, {right.float().mean():.1%} right", flush=True)
