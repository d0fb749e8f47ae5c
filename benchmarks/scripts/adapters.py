"""Fine-tune a language model by PEFT: low-rank adapters (LoRA) teach a GPT-2 that has read prose to read Python.

One sees the loss on code that is held out, in nats per character, before and while the adapters are trained:
    python adapters.py --optimizer adamw
"""
# mypy: ignore-errors

import argparse
import inspect
import pydoc_data.topics
import string

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from kfac_optim import KFACOptimizer, LossTerms

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--optimizer", choices=("kfac", "adamw"), default="kfac", help="of adapters (default: %(default)s)")
parser.add_argument("--lr", type=float, help="at the start (default: kfac 0.1, adamw 0.01)")
parser.add_argument("--steps", type=int, default=150, help="of fine-tuning (default: %(default)s)")
parser.add_argument("--steps-before", type=int, default=200, help="on prose, of all parameters (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
args = parser.parse_args()


def windows(text):
    numbers = torch.tensor([string.printable.index(each) for each in text if each in string.printable])
    return numbers[: len(numbers) // 64 * 64].view(-1, 64)


def train(optimizer, passages, steps):
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(1, steps + 1):
        batch = passages[torch.randint(len(passages), (32,))]
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 50 == 0 or step == steps:
            with torch.no_grad():
                print(f"step {step}: loss on held-out code {model(test, labels=test).loss:.3f}", flush=True)


torch.manual_seed(args.seed)
prose, code = windows("".join(pydoc_data.topics.topics.values())), windows(inspect.getsource(argparse))
code, test = code[:1200], code[1200:1400]
sizes = {"vocab_size": 100, "n_positions": 64, "n_embd": 96, "n_layer": 3, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
train(torch.optim.AdamW(model.parameters(), 0.003), prose, args.steps_before)
config = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
model = get_peft_model(model, config)
if args.optimizer == "kfac":
    optimizer = KFACOptimizer(model, args.lr or 0.1, momentum=0.9, loss_terms=LossTerms.POSITIONS)
else:
    optimizer = torch.optim.AdamW(model.parameters(), args.lr or 0.01)
train(optimizer, code, args.steps)
