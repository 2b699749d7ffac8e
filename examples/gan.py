"""Trains a GAN on a ring of points, and draws its generator's points between steps: python gan.py

The noise is the same each time, so the points' movement shows. Given a file name, it keeps the last picture there.
"""

import sys
from typing import Any

import numpy as np
import tensorflow as tf

import crankshaft
from crankshaft import make_optimizer, mean, minimize, step_context

WIDTH, HEIGHT = 48, 24  # of a picture, in characters


class Gan(crankshaft.Trainer):
    """A generator of points in the plane, and a critic that distinguishes them from the data's."""

    def build(self):
        layers = tf.keras.layers
        self.generator = tf.keras.Sequential([layers.Input([4]), layers.Dense(64, "relu"), layers.Dense(2)])
        self.critic = tf.keras.Sequential([layers.Input([2]), layers.Dense(64, "relu"), layers.Dense(1)])
        self.optimizer = make_optimizer(self, self.generator.trainable_variables)
        self.critic_optimizer = make_optimizer(self, self.critic.trainable_variables)

    def losses(self, real):
        """The two losses, of a batch of points."""
        noise = tf.random.stateless_normal(tf.stack([tf.shape(real)[0], 4]), step_context().seed())
        of_fake, of_real = self.critic(self.generator(noise))[:, 0], self.critic(real)[:, 0]
        entropy = tf.nn.sigmoid_cross_entropy_with_logits
        wrong = entropy(tf.ones_like(of_real), of_real) + entropy(tf.zeros_like(of_fake), of_fake)
        return {"loss": mean(entropy(tf.ones_like(of_fake), of_fake)), "critic_loss": mean(wrong)}

    def train_step(self, batch):
        return minimize(self, batch, self.losses, {"loss": self.optimizer, "critic_loss": self.critic_optimizer})

    def eval_step(self, batch):
        return self.losses(batch)


def ring(count: int) -> np.ndarray:
    """Samples points [count, 2] on a circle, with a little noise."""
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 2 * np.pi, count)
    return (np.stack([np.cos(angles), np.sin(angles)], 1) + rng.normal(0, 0.05, (count, 2))).astype(np.float32)


def picture(points: np.ndarray) -> str:
    """Draws the points between -1.5 and 1.5 in characters."""
    counts, _, _ = np.histogram2d(-points[:, 1], points[:, 0], (HEIGHT, WIDTH), [[-1.5, 1.5], [-1.5, 1.5]])
    return "\n".join("".join(" .:*#"[min(int(count), 4)] for count in row) for row in counts)


def train(pictures: int = 5, steps: int = 400) -> tuple[str, float]:
    """Trains and draws in turn; returns the last picture, and how far the points are from the ring on average."""
    noise = np.random.default_rng(1).normal(size=(500, 4)).astype(np.float32)
    flags: dict[str, Any] = {"learning_rate": 0.002, "optimizer_arg": {"beta_1": 0.5}, "jit": "off", "progress": "off"}
    with crankshaft.open_run(Gan, data=(ring(4096),), mode="train", **flags) as run:
        for _ in range(pictures):
            losses = run.train(steps=steps)
            made = run.models["generator"](noise).numpy()
            print(f"step {run.step}: {losses}\n{picture(made)}", flush=True)
    return picture(made), float(np.abs(np.linalg.norm(made, axis=1) - 1).mean())


if __name__ == "__main__":
    last, _ = train()
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            file.write(last + "\n")
