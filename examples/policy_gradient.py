"""Balances gymnasium's CartPole by policy gradients: python policy_gradient.py

The program plays, and the run trains on these games, with an update for each batch of games: REINFORCE (Williams 1992,
doi.org/10.1007/BF00992696) with the mean return of each time step as the baseline. Needs `pip install gymnasium`.
"""

import gymnasium
import numpy as np
import tensorflow as tf

import crankshaft

GAMES = 16  # an update
DISCOUNT = 0.99


class Policy(crankshaft.Trainer):
    """Logits of the two actions; labels are the action that was taken, and how much better it was than expected."""

    def build_model(self):
        layers = tf.keras.layers
        return tf.keras.Sequential([layers.Input([4]), layers.Dense(64, "tanh"), layers.Dense(2)])

    def loss(self, outputs, batch):
        _, (actions, advantages) = batch
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=actions, logits=outputs)
        return crankshaft.mean(losses * advantages)


# An example, from which the run learns the form of all.
FORM = np.zeros((1, 4), np.float32), (np.zeros(1, np.int32), np.zeros(1, np.float32))


def play(run: crankshaft.Run, games: list[gymnasium.Env], rng: np.random.Generator):
    """Plays each game once; returns observations [t, games, 4], actions and rewards [t, games], 0 after an end."""
    now = np.stack([game.reset(seed=int(rng.integers(1 << 31)))[0] for game in games]).astype(np.float32)
    alive = np.ones(len(games), bool)
    observations, actions, rewards = [], [], []
    while alive.any():
        logits = run.predict(now)
        taken = (rng.random(len(games)) < 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))).astype(np.int32)
        observations.append(now.copy())
        actions.append(taken)
        rewards.append(alive.astype(np.float32))
        for number in np.flatnonzero(alive):
            now[number], _, fell, over, _ = games[number].step(int(taken[number]))
            alive[number] = not (fell or over)
    return np.stack(observations), np.stack(actions), np.stack(rewards)


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """Returns how much better each step's discounted return is than the mean of its time, in standard deviations."""
    returns = np.zeros_like(rewards)
    for t in reversed(range(len(rewards))):
        returns[t] = rewards[t] + DISCOUNT * (returns[t + 1] if t + 1 < len(rewards) else 0)
    advantages = returns - returns.mean(axis=1, keepdims=True)
    return advantages / (advantages[rewards > 0].std() + 1e-6)


def learn(most_updates: int = 150, solved: float = 475.0) -> float:
    """Learns until the games of two updates last `solved` steps on average, 500 being the most; returns the average."""
    rng, games = np.random.default_rng(0), [gymnasium.make("CartPole-v1") for _ in range(GAMES)]
    lasted = [0.0, 0.0]
    with crankshaft.open_run(
        Policy, data=(FORM,), mode="train", global_batch_size=500 * GAMES, learning_rate=0.01, jit="off",
        progress="off",
    ) as run:  # fmt: skip
        while np.mean(lasted[-2:]) < solved and run.step < most_updates:
            observations, actions, rewards = play(run, games, rng)
            there = rewards > 0
            run.train(data=(observations[there], (actions[there], advantages_of(rewards)[there])), steps=1)
            lasted.append(rewards.sum() / GAMES)
            if run.step % 5 == 0:
                print(f"update {run.step}: games last {lasted[-1]:.0f} steps", flush=True)
    return float(np.mean(lasted[-2:]))


if __name__ == "__main__":
    print(f"games last {learn():.0f} steps")
