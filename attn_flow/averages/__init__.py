"""The ways to average under softmax weights: dense, over near keys only, on the circle, compiled, balanced."""
