"""Which tensors learn follows from the recipe alone, so it is the same set in both backends."""

import pytest

from pi05.errors import ConfigError
from pi05.params import rows
from pi05.recipe import AdamW, Groups, Recipe
from pi05.spec import LoRA, ModelSpec

TINY = ModelSpec.tiny()


def test_a_full_fine_tune_trains_every_tensor() -> None:
    assert Recipe().trains(TINY) == {row.name for row in rows(TINY)}


def test_a_frozen_group_does_not_learn() -> None:
    names = Recipe(groups=Groups(vision="freeze", trunk="freeze")).trains(TINY)
    assert names == {row.name for row in rows(TINY) if row.group in ("expert", "heads")}


def test_with_lora_only_the_adapters_of_a_group_learn() -> None:
    spec = TINY.replace(trunk__lora=LoRA(4, 8.0))
    names = {name for name in Recipe(groups=Groups(trunk="lora")).trains(spec) if name.startswith("trunk.")}
    assert names == {f"trunk.layers.{proj}.lora_{ab}" for proj in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj") for ab in "ab"}


@pytest.mark.parametrize(("groups", "spec", "said"), [
    (Groups(trunk="lora"), TINY, "set model.lora.trunk"),
    (Groups(), TINY.replace(expert__lora=LoRA(4, 4.0)), "groups.expert is 'train'"),
])  # fmt: skip
def test_adapters_that_would_not_learn_or_do_not_exist_are_refused(groups: Groups, spec: ModelSpec, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Recipe(groups=groups).trains(spec)


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Groups(heads="lora"), "groups.heads"),
    (lambda: Groups(vision="thaw"), "groups.vision"),
    (lambda: Groups("freeze", "freeze", "freeze", "freeze"), "nothing would be trained"),
    (lambda: AdamW(b1=1.0), "optimizer.b1"),
    (lambda: AdamW(b2=-0.1), "optimizer.b2"),
    (lambda: AdamW(eps=0.0), "optimizer.eps"),
    (lambda: AdamW(weight_decay=-1.0), "optimizer.weight_decay"),
    (lambda: AdamW(clip_norm=0.0), "optimizer.clip_norm"),
    (lambda: Recipe(ema_decay=1.0), "ema_decay"),
    (lambda: Recipe(grad_accum_steps=0), "grad_accum_steps"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(make, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()
