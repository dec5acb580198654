"""Reinforcement learning end to end, in small: one trainer, some rollout workers, and patches between them.

    trainer ── versions of the weights ──► Publisher ─► store ─► Subscriber ──► workers
       ▲                                                                          │
       └── tokens, rewards, log-probabilities ◄── queue (a folder) ◄──────────────┘

`python -m examples.rl --help` says what can be chosen; research/results/rl.md what it shows.
"""
