"""Train a GPT-2 of 0.3 million parameters on the characters of a text, by the Trainer of Hugging Face.

One sees the loss of both parts of the text as the rate falls along a cosine, in nats per character:
    python language_model.py --optimizer adamw --text input.txt
"""
# mypy: ignore-errors

import argparse
import pathlib
import pydoc_data.topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from kfac_optim import KFACOptimizer, SelectedUpdates

RATES = {"kfac": 0.02, "adamw": 0.003}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", type=pathlib.Path, help="a file (default: the pages that Python's own help() shows)")
parser.add_argument("--optimizer", choices=RATES, default="kfac", help="(default: %(default)s)")
parser.add_argument("--lr", type=float, help=f"the highest (default: {RATES})")
parser.add_argument("--steps", type=int, default=400, help="(default: %(default)s)")
parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
args = parser.parse_args()

torch.manual_seed(args.seed)
text = args.text.read_text() if args.text else "".join(pydoc_data.topics.topics.values())
characters = sorted(set(text))
tokens = torch.tensor([characters.index(character) for character in text])
windows = [{"input_ids": window, "labels": window} for window in tokens.split(64) if len(window) == 64]
train, test = windows[: len(windows) * 9 // 10], windows[len(windows) * 9 // 10 :]
sizes = {"vocab_size": len(characters), "n_positions": 64, "n_embd": 96, "n_layer": 3, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
lr = args.lr or RATES[args.optimizer]
if args.optimizer == "kfac":
    choices = {"step_size": SelectedUpdates(), "skip_layers": ["lm_head"]}  # the output layer takes AdamW's step
    optimizer = KFACOptimizer(model, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.1, **choices)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
arguments = TrainingArguments(
    output_dir="language_model",  # nothing is saved
    seed=args.seed,
    dataloader_pin_memory=False,
    max_steps=args.steps,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=256,
    lr_scheduler_type="cosine",
    warmup_steps=args.steps // 10,
    logging_steps=50,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=test, optimizers=(optimizer, None))
trainer.train()
print(f"the part that was held out: {trainer.evaluate()['eval_loss']:.3f} nats per character")
