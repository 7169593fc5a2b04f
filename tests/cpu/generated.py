"""Prints the output of a small Llama that transformers splits over the ranks of a process group.

generated.py BACKEND FOLDER
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
import transformers

import collx.backend  # noqa: F401

backend, folder = sys.argv[1:]
dist.init_process_group(backend)
if dist.get_rank() == 0:
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
dist.barrier()
model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
prompt = torch.randint(128, (2, 7), generator=torch.Generator().manual_seed(3))
with torch.no_grad(), torch.profiler.profile() as profile:
    logits = model(prompt).logits
tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
print("tokens", tokens.tolist(), "logits", logits.tolist())
events = {event.key for event in profile.key_averages()}
print("sums by", *sorted(events & {"collx:all_reduce", "gloo:all_reduce"}))
dist.destroy_process_group()
