"""Every family as a reward model: a step trains all parameters, and the export reloads with the same scores.

Scores match transformers if it has the class.
"""

import pytest
import torch
import transformers
from helpers import save_checkpoint
from models.test_families import VARIANTS
from recipes.test_rewards import FAMILIES as SHOWN
from recipes.test_rewards import made_a_reward_model
from torch.testing import assert_close

from tune import checkpointers, distributed
from tune.collators import Batch
from tune.losses import score

FAMILIES = {name.partition("-")[0]: variant for name, variant in reversed(VARIANTS.items())}
TOKENS = torch.arange(5, 45)


@pytest.mark.weekly
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SHOWN])
def test_family_trains_as_a_reward_model(family, tmp_path):
    config_class, changes = FAMILIES[family]
    base = save_checkpoint(tmp_path / "base", config_class, **{"pad_token_id": None} | changes)
    model, tokenizer = made_a_reward_model(base)
    batch = Batch.of(TOKENS[None].numpy(), documents=(TOKENS[None] > 20).int().numpy())
    before = score(model, batch)
    (before[0] - before[1]).sigmoid().log().neg().backward()
    still = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.isfinite().all()
    ]
    assert still == []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
        after = score(model, batch)
    assert (after - before).abs().max() > 1e-6
    checkpointers.export(model, tokenizer, tmp_path / "model", distributed.init("cpu"), source=str(base))
    again = checkpointers.load_model(str(tmp_path / "model"), head="score")
    with torch.no_grad():
        assert_close(score(again, batch), after, atol=1e-6, rtol=1e-6)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    if type(config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "model", attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            expected = [theirs(part[None]).logits[0, 0] for part in (TOKENS[:16], TOKENS[16:])]
        assert_close(after, torch.stack(expected), atol=1e-5, rtol=1e-5)
