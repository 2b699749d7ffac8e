"""Balances gymnasium's CartPole by proximal policy optimization: python ppo.py

The program plays for some steps, and the run trains for some epochs on them: PPO (Schulman et al. 2017,
https://arxiv.org/abs/1707.06347) with generalized advantage estimates (Schulman et al. 2016,
https://arxiv.org/abs/1506.02438). Needs `pip install gymnasium`.
"""

import gymnasium
import numpy as np
import tensorflow as tf

import crankshaft

GAMES, STEPS, EPOCHS = 16, 128, 4
DISCOUNT, SMOOTHING, CLIP = 0.99, 0.95, 0.2


class ActorCritic(crankshaft.Trainer):
    """Logits of the two actions, and the value; labels are the action, its log-probability, advantage and return."""

    def build_model(self):
        x = tf.keras.Input([4])
        hidden = [tf.keras.layers.Dense(64, "tanh")(x) for _ in range(2)]
        return tf.keras.Model(x, tuple(map(lambda size, h: tf.keras.layers.Dense(size)(h), (2, 1), hidden)))

    def loss(self, outputs, batch):
        (logits, values), (_, (actions, before, advantages, returns)) = outputs, batch
        ratio = tf.exp(-tf.nn.sparse_softmax_cross_entropy_with_logits(labels=actions, logits=logits) - before)
        gains = tf.minimum(ratio * advantages, tf.clip_by_value(ratio, 1 - CLIP, 1 + CLIP) * advantages)
        entropy = -tf.reduce_sum(tf.nn.softmax(logits) * tf.nn.log_softmax(logits), -1)
        return crankshaft.mean(0.5 * tf.square(values[:, 0] - returns) - gains - 0.01 * entropy)


# An example, from which the run learns the form of all.
FORM = np.zeros((1, 4), np.float32), (np.zeros(1, np.int32), *np.zeros((3, 1), np.float32))


def play(run: crankshaft.Run, games: list[gymnasium.Env], now: np.ndarray, rng: np.random.Generator):
    """Plays STEPS steps of each game; returns arrays [STEPS, GAMES, ...] to train on, and which games ended."""
    steps = []
    for _ in range(STEPS):
        logits, values = run.predict(now)
        log_odds = logits[:, 1] - logits[:, 0]
        taken = (rng.random(GAMES) < 1 / (1 + np.exp(-log_odds))).astype(np.int32)
        seen, ends = now.copy(), np.zeros(GAMES, np.float32)
        for number, game in enumerate(games):
            now[number], _, fell, over, _ = game.step(int(taken[number]))
            if fell or over:
                ends[number], now[number] = 1, game.reset()[0]
        steps.append((seen, taken, -np.logaddexp(0, np.where(taken, -log_odds, log_odds)), values[:, 0], ends))
    seen, taken, before, values, ends = map(np.stack, zip(*steps, strict=True))
    following = np.concatenate([values[1:], run.predict(now)[1].T])
    advantages, ahead = np.zeros_like(values), np.zeros(GAMES, np.float32)
    for t in reversed(range(STEPS)):  # each step is rewarded by 1
        ahead = 1 + DISCOUNT * (1 - ends[t]) * (following[t] + SMOOTHING * ahead) - values[t]
        advantages[t] = ahead
    scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    return (seen, (taken, before, scaled, advantages + values)), ends


def learn(most: int = 80, solved: float = 475.0) -> float:
    """Learns until the games of two rounds last `solved` steps on average, 500 being the most; returns the average."""
    rng, games = np.random.default_rng(0), [gymnasium.make("CartPole-v1") for _ in range(GAMES)]
    now = np.stack([game.reset(seed=number)[0] for number, game in enumerate(games)])
    lasted = [0.0, 0.0]
    with crankshaft.open_run(
        ActorCritic, data=(FORM,), mode="train", global_batch_size=256, learning_rate=0.002, jit="off",
        clip_norm=0.5, progress="off",
    ) as run:  # fmt: skip
        while np.mean(lasted[-2:]) < solved and len(lasted) < most:
            collected, ends = play(run, games, now, rng)
            run.train(data=tf.nest.map_structure(lambda x: x.reshape(-1, *x.shape[2:]), collected), epochs=EPOCHS)
            lasted.append(STEPS * GAMES / max(1.0, ends.sum()))
            if len(lasted) % 5 == 0:
                print(f"round {len(lasted)}: games last {lasted[-1]:.0f} steps", flush=True)
    return float(np.mean(lasted[-2:]))


if __name__ == "__main__":
    print(f"games last {learn():.0f} steps")
