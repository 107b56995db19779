"""Proximal policy optimization: 32 agents learn to balance a pole, killed twice on the way.

Reinforcement learning has no data: the step itself acts in the environment, and `ft.NoData` counts
the steps. The environment is CartPole (Barto, Sutton and Anderson, 1983), with the constants and
the limit of 500 steps of Gymnasium's CartPole-v1; the algorithm is PPO (Schulman et al., 2017,
https://arxiv.org/abs/1707.06347), with the settings of purejaxrl. The agents differ in their random
numbers only, and one program trains all of them. The process kills itself twice, is started again,
and ends with the same bits as a training without interruption.

    python examples/ppo.py            # 32 agents, 500 000 steps each: minutes on two CPU cores
    python examples/ppo.py --quick    # 4 agents, 20 480 steps each: half a minute
"""

# %% Options. The script sets `--folder` and `--kill-at` itself when it starts the training process
from _example import arguments

args = arguments(
    __doc__,
    quick="4 agents, 40 updates",
    agents=32,
    updates=976,
    folder=("", "the folder of the run; set by the script itself"),
    kill_at=(10**9, "the update at which the process kills itself; set by the script itself"),
)

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import flax.linen as nn
import flax.struct
import functrain as ft
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from flax.linen.initializers import orthogonal

agents, updates = (4, 40) if args.quick else (args.agents, args.updates)
COPIES, ROLLOUT, EPOCHS, PARTS = 4, 128, 4, 4  # of the environment, steps, and minibatches
DISCOUNT, GAE_DECAY, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5


# %% The environment. A cart of 1 kg carries a pole of 0.1 kg and 1 m, and is pushed to the left or
# right for 0.02 s. Every step has a reward of 1, until the pole has fallen
def push(cart, action):
    _, speed, angle, spin = cart
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    push = (force + 0.05 * spin**2 * sin) / 1.1
    spin_change = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    speed_change = push - 0.05 * spin_change * cos / 1.1
    return cart + 0.02 * jnp.stack([speed, speed_change, spin, spin_change])


def has_fallen(cart):
    return (jnp.abs(cart[0]) > 2.4) | (jnp.abs(cart[2]) > 12 * jnp.pi / 180)


def start(key, copies):
    return jax.random.uniform(key, (copies, 4), minval=-0.05, maxval=0.05)


# %% The agent. One network chooses actions, the other one estimates the sum of future rewards
class Agent(nn.Module):
    @nn.compact
    def __call__(self, cart):
        def network(outputs, scale):
            x = cart
            for _ in range(2):
                x = nn.tanh(nn.Dense(64, kernel_init=orthogonal(2**0.5))(x))
            return nn.Dense(outputs, kernel_init=orthogonal(scale))(x)

        return nn.log_softmax(network(2, 0.01)), network(1, 1.0)[..., 0]


model = ft.from_linen(Agent())
rate = optax.linear_schedule(2.5e-4, 0.0, updates * EPOCHS * PARTS)
tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate, eps=1e-5))


# %% The state. Besides the networks, it has the environments, so that a checkpoint has them too
class Learner(flax.struct.PyTreeNode):
    train: ft.TrainState
    carts: jax.Array  # f32[copies, 4]
    age: jax.Array  # i32[copies]: steps since the last start
    returns: jax.Array  # f32[copies]: the sum of the rewards of the last episode that has ended


def make_learner(key):
    init_key, start_key, train_key = jax.random.split(key, 3)
    carts = start(start_key, COPIES)
    params, _ = model.init(init_key, carts)
    train = ft.TrainState.create(params=params, tx=tx, rng=train_key)
    return Learner(train, carts, jnp.zeros(COPIES, jnp.int32), jnp.zeros(COPIES))


# %% The loss. It limits how far the probabilities move from those with which the agent acted
def loss_fn(params, model_state, batch, *, rng, training):
    log_policy, value = model.apply(params, model_state, batch["carts"]).outputs
    log_p = jnp.take_along_axis(log_policy, batch["action"][:, None], 1)[:, 0]
    ratio = jnp.exp(log_p - batch["log_p"])
    advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
    near = batch["value"] + jnp.clip(value - batch["value"], -CLIP, CLIP)
    errors = jnp.maximum((value - batch["target"]) ** 2, (near - batch["target"]) ** 2)
    entropy = -(jnp.exp(log_policy) * log_policy).sum(1).mean()
    return VALUE * errors.mean() / 2 - gain - ENTROPY * entropy, ft.Aux(model_state)


# %% The step. It acts, estimates the advantage of each action (Schulman et al., 2015,
# https://arxiv.org/abs/1506.02438), and updates the networks with minibatches of what it saw
def step(learner, batch):
    act_key, mix_key = jax.random.split(jax.random.fold_in(learner.train.rng, learner.train.step))

    def act(scene, key):
        carts, age, returns = scene
        action_key, start_key = jax.random.split(key)
        log_policy, value = model.apply(learner.train.params, {}, carts).outputs
        action = jax.random.categorical(action_key, log_policy)
        log_p = jnp.take_along_axis(log_policy, action[:, None], 1)[:, 0]
        new = jax.vmap(push)(carts, action)
        done = jax.vmap(has_fallen)(new) | (age + 1 == 500)
        seen = {"carts": carts, "action": action, "log_p": log_p, "value": value, "done": done}
        new = jnp.where(done[:, None], start(start_key, COPIES), new)
        return (new, jnp.where(done, 0, age + 1), jnp.where(done, age + 1.0, returns)), seen

    scene = learner.carts, learner.age, learner.returns
    (carts, age, returns), seen = jax.lax.scan(act, scene, jax.random.split(act_key, ROLLOUT))
    _, last_value = model.apply(learner.train.params, {}, carts).outputs

    def look_back(later, now):
        advantage, next_value = later
        goes_on = 1.0 - now["done"]
        error = 1.0 + DISCOUNT * next_value * goes_on - now["value"]
        advantage = error + DISCOUNT * GAE_DECAY * goes_on * advantage
        return (advantage, now["value"]), advantage

    begin = jnp.zeros(COPIES), last_value
    _, advantage = jax.lax.scan(look_back, begin, seen, reverse=True)
    seen |= {"advantage": advantage, "target": advantage + seen["value"]}
    seen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)

    def learn(train, rows):
        train, loss, _ = ft.update(train, loss_fn, tx, jax.tree.map(lambda x: x[rows], seen))
        return train, loss

    mix_keys = jax.random.split(mix_key, EPOCHS)
    orders = jax.vmap(jax.random.permutation, (0, None))(mix_keys, ROLLOUT * COPIES)
    minibatches = orders.reshape(EPOCHS * PARTS, -1)
    train, losses = jax.lax.scan(learn, learner.train, minibatches)
    return Learner(train, carts, age, returns), {"loss": losses.mean(), "return": returns.mean()}


# %% Training. `ft.NoData` takes the place of data, and the population that of one agent
def train(folder, *more_hooks):
    population = ft.population.create(make_learner, jax.random.key(args.seed), members=agents)
    return ft.fit(
        population,
        ft.population.step(step),
        ft.NoData(updates),
        hooks=[ft.hooks.JSONLines(folder / "log.jsonl", every=10), *more_hooks],
        checkpointer=ft.Checkpointer(folder / "checkpoints", every=max(1, updates // 10), keep=1),
        verbose=0,
    )


# %% The training process. It kills itself at the update `--kill-at`, as a preempted machine might
if args.folder:

    @ft.at(args.kill_at)
    def kill(event):
        os.kill(os.getpid(), signal.SIGKILL)

    train(pathlib.Path(args.folder), kill)
    sys.exit()

# %% Three processes for one training. The first two are killed
for folder in (args.output / "killed", args.output / "straight"):
    shutil.rmtree(folder, ignore_errors=True)
kills = [updates // 3 + 1, 2 * updates // 3 + 1, 10**9]
for update in kills:
    options = ["--folder", str(args.output / "killed"), "--kill-at", str(update)]
    process = subprocess.run([sys.executable, *sys.argv, *options], check=False)
    assert process.returncode == (0 if update == kills[-1] else -signal.SIGKILL)

# %% The training without interruption. The other one has finished, so `fit` returns its result
straight, killed = train(args.output / "straight"), train(args.output / "killed")


def numbers(tree):
    key = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, key) else x)
        for x in jax.tree.leaves(tree)
    ]


for name, a, b in (
    ("state", straight.state, killed.state),
    ("history", straight.history.steps, killed.history.steps),
):
    is_equal = all(map(np.array_equal, numbers(a), numbers(b)))
    print(f"{name}: killed twice and without interruption {'equal' if is_equal else 'NOT equal'}")
returns = killed.history.steps["return"]  # [updates, agents]
final = returns[-len(returns) // 10 :].mean(0)
print(f"mean return of the last tenth: {final.mean():.0f}, of the worst agent {final.min():.0f}")
print(f"agents with a mean return of 450 or more: {(final >= 450).sum()} of {agents}")

# %% Plot. The return of each agent, their median, and the updates at which the process was killed
figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
taken = np.arange(1, updates + 1) * ROLLOUT * COPIES
panel.plot(taken, returns, color="#b8c4d6", lw=0.6)
panel.plot(taken, np.median(returns, axis=1), color="#1f5fa8", label="median")
for update in kills[:-1]:
    panel.axvline(update * ROLLOUT * COPIES, color="#d1602a", lw=1, ls=":")
panel.set(xlabel="steps of an agent in its environment", ylabel="return of the last episodes")
panel.legend()
figure.savefig(args.output / "ppo.png", dpi=120)
print(f"wrote {args.output / 'ppo.png'}")
