# SPDX-License-Identifier: Apache-2.0
"""Models of real shape with random weights, and a training step of each task.

sft, lora  the mean cross entropy of the answers' tokens
dpo        the loss of arXiv:2305.18290 on a document's two answers, with the model's first weights as the reference
rm         the pairwise loss of arXiv:2203.02155 over a document's answers, best first

Losses are transformers' and TRL's; logits are computed only where there is a label, some tokens at a time, as fused
losses do. All layers are checkpointed. The optimiser is AdamW on the weights, adapters too, as they are: bfloat16 on a
GPU. There torch.compile fuses what is around the attention, as training frameworks have it: the inner layers, the norms
and the rotary embedding.
"""

import copy
import functools

import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama

from benchmarks.end_to_end.contenders import CONTENDERS

_LLAMA_3 = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _shape(layers, hidden, inner, heads, heads_kv, head_dim, vocabulary=128256, tied=True, factor=32.0):
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads_kv,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "rope_parameters": {**_LLAMA_3, "factor": factor},
    }


SHAPES = {
    "1b": _shape(16, 2048, 8192, 32, 8, 64),  # Llama 3.2
    "3b": _shape(28, 3072, 8192, 24, 8, 128),
    "8b": _shape(32, 4096, 14336, 32, 8, 128, tied=False, factor=8.0),  # Llama 3.1
    "tiny": _shape(2, 64, 96, 4, 2, 16, vocabulary=512),  # for the tests
}
LONGEST = 1 << 21  # positions that a model may have
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear", "init_lora_weights": True}
RATES = {"sft": 1e-4, "lora": 1e-3, "dpo": 1e-4, "rm": 1e-4}  # for weights that begin at random
DPO_BETA = 0.1
CHUNK = 2048  # tokens whose logits are there at a time


def make(shape, device, attention, seed=0):
    """LlamaForCausalLM with random weights, bfloat16 on a GPU and float32 elsewhere, its layers checkpointed."""
    config = transformers.LlamaConfig(**SHAPES[shape], max_position_embeddings=LONGEST)
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    torch.manual_seed(seed)
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation=attention)
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.20
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if dtype == torch.bfloat16:
        _compile(model)
    return model.train()


def _compile(model):
    """Compiles what is around the attention; layers share the code."""
    _compile_rotary_embedding()
    for layer in model.model.layers:
        for module in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
            module.compile()


@functools.cache
def _compile_rotary_embedding():
    modeling_llama.apply_rotary_pos_emb = torch.compile(modeling_llama.apply_rotary_pos_emb)


class Trainer:
    """A model in training for one task, under one contender's attention.

    The weights of `model` change; for lora adapters are put into it, which stay: every task has a new one.
    """

    def __init__(self, task, model, contender):
        self.task, self.contender, self.model, self.layers = task, contender, model, model.model
        self.vocabulary, self.reference, self.score = model.lm_head, None, None
        trained = model
        if task == "lora":
            from peft import LoraConfig, get_peft_model

            trained = get_peft_model(model, LoraConfig(**LORA), autocast_adapter_dtype=False)
        elif task == "dpo":
            self.reference = copy.deepcopy(model).eval().requires_grad_(False)
        elif task == "rm":
            weight = model.model.embed_tokens.weight
            self.score = torch.nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=weight.dtype)
        self.parameters = [x for x in trained.parameters() if x.requires_grad]
        self.parameters += [] if self.score is None else [self.score.weight]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=RATES[task], weight_decay=0.0, fused=True)

    def step(self, batch, after_forward=lambda: None):
        """The loss before the step; the host waits for nothing. after_forward: called between the passes."""
        loss = self.loss(batch)
        after_forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def loss(self, batch):
        """The loss of a batch, with the mask made anew."""
        return getattr(self, f"_{self.task}")(batch, self.contender.mask(batch))

    def _hidden(self, layers, batch, mask):
        arguments = self.contender.arguments(mask)
        out = layers(batch.input_ids, position_ids=batch.position_ids, use_cache=False, **arguments)
        return out.last_hidden_state[0]

    def _sft(self, batch, mask):
        return -log_probs(self._hidden(self.layers, batch, mask), self.vocabulary.weight, batch).mean()

    _lora = _sft

    def _dpo(self, batch, mask):
        with torch.no_grad():
            reference = self._answers(self.reference.model, self.reference.lm_head, batch, mask)
        chosen, rejected = (self._answers(self.layers, self.vocabulary, batch, mask) - reference).unbind(1)
        return -F.logsigmoid(DPO_BETA * (chosen - rejected)).mean()

    def _answers(self, layers, vocabulary, batch, mask):
        """Log probabilities of the answers [documents, answers]."""
        each = log_probs(self._hidden(layers, batch, mask), vocabulary.weight, batch)
        return each.new_zeros(batch.last.numel()).index_add(0, batch.of_answer, each).view(batch.last.shape)

    def _rm(self, batch, mask):
        rewards = self.score(self._hidden(self.layers, batch, mask)[batch.last]).float()[..., 0]
        better, worse = torch.triu_indices(*[rewards.shape[1]] * 2, offset=1, device=rewards.device)
        return -F.logsigmoid(rewards[:, better] - rewards[:, worse]).mean()


def log_probs(hidden, weight, batch):
    """float32 log probabilities [targets] of the targets; their logits are computed again in the backward."""
    parts = zip(batch.sources.split(CHUNK), batch.targets.split(CHUNK))
    return torch.cat([checkpoint(_log_probs, hidden, weight, *part, use_reentrant=False) for part in parts])


def _log_probs(hidden, weight, sources, targets):
    logits = F.linear(hidden.index_select(0, sources), weight).float()
    return -F.cross_entropy(logits, targets, reduction="none")


def trainer(shape, task, contender, device, seed=0):
    """A Trainer of a new model."""
    made = CONTENDERS[contender](device)
    return Trainer(task, make(shape, device, made.attention, seed), made)
