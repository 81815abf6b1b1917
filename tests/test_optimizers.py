import pytest
import torch

from fedscale.local import optimizers

RULES = {
    "adam": (optimizers.build("adam"), lambda p, lr: torch.optim.Adam(p, lr=lr)),
    "sgd": (optimizers.build("sgd"), lambda p, lr: torch.optim.SGD(p, lr=lr)),
    "momentum": (
        optimizers.build("sgd", momentum=0.99),
        lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.99),
    ),
}


def stacked(clients, seed=0, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    shapes = {"prompts": (3, 4), "head.weight": (5, 4), "head.bias": (5,)}
    return {k: torch.randn(clients, *s, generator=rng, dtype=dtype) for k, s in shapes.items()}


@pytest.mark.parametrize("name", RULES)
def test_each_row_moves_as_torch_moves_it_alone(name):
    rule, reference = RULES[name]
    params, rates = stacked(3), {"prompts": 0.1, "head.weight": 0.01, "head.bias": 0.01}
    alone = [{k: v[c].clone().requires_grad_() for k, v in params.items()} for c in range(3)]
    others = [[reference([p], rates[k]) for k, p in client.items()] for client in alone]
    moments = rule.init(params)
    for step in range(6):
        grads = stacked(3, seed=step + 1)
        rule.update(params, grads, moments, rates, step + 1)
        for c, client in enumerate(alone):
            for k, p in client.items():
                p.grad = grads[k][c].clone()
            for optimizer in others[c]:
                optimizer.step()
    for k, value in params.items():
        expected = torch.stack([client[k].detach() for client in alone])
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", RULES)
def test_a_slice_of_clients_moves_like_the_whole(name):
    rule, _ = RULES[name]
    whole, part = stacked(4, dtype=torch.float32), stacked(4, dtype=torch.float32)
    rates = dict.fromkeys(whole, 0.1)
    moments, kept = rule.init(whole), rule.init(part)
    for step, live in enumerate((4, 3, 1), start=1):
        grads = stacked(4, seed=step, dtype=torch.float32)
        rule.update(whole, grads, moments, rates, step)
        rule.update(
            {k: v[:live] for k, v in part.items()},
            {k: v[:live] for k, v in grads.items()},
            {k: tuple(m[:live] for m in ms) for k, ms in kept.items()},
            rates,
            step,
        )
    for k in whole:
        assert torch.equal(whole[k][:1], part[k][:1])
        assert not torch.equal(whole[k][3:], part[k][3:])


def test_gradients_are_left_as_they_are():
    for rule, _ in RULES.values():
        params, grads = stacked(2), stacked(2, seed=1)
        before = {k: v.clone() for k, v in grads.items()}
        moments = rule.init(params)
        for step in (1, 2):
            rule.update(params, grads, moments, dict.fromkeys(params, 0.1), step)
        assert all(torch.equal(grads[k], before[k]) for k in grads)


@pytest.mark.parametrize(
    ("name", "momentum", "words"),
    [
        ("adagrad", 0.0, "local.optimizer='adagrad'"),
        ("sgd", 1.0, "local.momentum=1.0"),
        ("sgd", -0.1, "local.momentum=-0.1"),
        ("sgd", float("nan"), "local.momentum=nan"),
    ],
)
def test_bad_arguments_are_named(name, momentum, words):
    with pytest.raises(ValueError, match=words) as error:
        optimizers.build(name, momentum=momentum)
    assert "\n" not in str(error.value)
