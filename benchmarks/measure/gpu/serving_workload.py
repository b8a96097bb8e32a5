# SPDX-License-Identifier: Apache-2.0
"""A random Llama and requests to it, answered by transformers' continuous batching with any attention."""

import random

import torch
import transformers
from flashmask.integrations.transformers import register
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from benchmarks.peers import LeftOut

PACKAGES = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}


class Workload:
    """shape: of the model, bfloat16 on a GPU and float32 elsewhere. lengths: the shortest and the longest prompt."""

    def __init__(self, shape, requests, lengths, answer, device, **batching):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**shape, max_position_embeddings=lengths[1] + answer)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        with torch.device(device):
            self.model = transformers.LlamaForCausalLM._from_config(config, dtype=dtype).eval()
        draw = random.Random(0)
        self.prompts = [
            [draw.randrange(config.vocab_size) for _ in range(draw.randint(*lengths))] for _ in range(requests)
        ]
        self.answer, self.tokens = answer, requests * answer
        self.generation = transformers.GenerationConfig(
            max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        pages = sum(-(-(len(prompt) + answer) // batching["page_size"]) for prompt in self.prompts)
        self.batching = transformers.ContinuousBatchingConfig(
            **batching, num_blocks=pages + 1, auto_switch_to_flash=False
        )

    def answers(self, attention):
        """(tokens a second, the answers) by an attention of that name; None: ours."""
        if attention in PACKAGES and not PACKAGES[attention]():
            raise LeftOut(f"transformers finds no package of {attention}")
        self.model.set_attn_implementation(attention or register())
        results = list(self.model.generate_batch(self.prompts, self.generation, self.batching).values())
        made = [result.generated_tokens for result in results]
        if [len(tokens) for tokens in made] != [self.answer] * len(self.prompts):
            why = next((result.error for result in results if result.error), "without an error")
            raise RuntimeError(f"{sum(map(len, made))} of {self.tokens} tokens were answered: {why}")
        begin = min(result.created_time for result in results)
        return self.tokens / (max(result.lifespan[1] for result in results) - begin), made

    def description(self):
        """Sizes and versions, for a receipt."""
        batching = {name: getattr(self.batching, name) for name in ("page_size", "num_blocks", "max_batch_tokens")}
        return {
            "transformers": transformers.__version__,
            "model": self.model.config.to_diff_dict(),
            "requests": len(self.prompts),
            "prompt_tokens": sum(map(len, self.prompts)),
            "answer_tokens": self.answer,
            **batching,
        }
