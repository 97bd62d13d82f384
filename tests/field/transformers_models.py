"""Models of Hugging Face transformers, small, as `--model`: each returns an object with `.loss`."""

import torch
import transformers

TOKENS = 61
SMALL = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
GROUPED = {**SMALL, "num_key_value_heads": 1, "use_cache": False}


def _causal(model):
    """The model with batches of (input_ids, labels) as keyword arguments."""

    def batch(generator):
        ids = torch.randint(TOKENS, (2, 8), generator=generator)
        return {"input_ids": ids, "labels": ids}

    model.train()
    return model, batch


def llama():
    return _causal(transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)))


def gpt2():
    """Tied head, dropout."""
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=32, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    return _causal(transformers.GPT2LMHeadModel(config))


def mixtral():
    """Experts that some batches do not use."""
    config = transformers.MixtralConfig(**GROUPED, num_local_experts=3, num_experts_per_tok=1)
    return _causal(transformers.MixtralForCausalLM(config))


def bert():
    """Dropout, token types, a pooler that the masked-language loss does not use."""
    return _causal(transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)))
