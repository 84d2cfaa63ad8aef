"""Measurements of shmbus and of other ways to move a trajectory; ``python -m bench`` runs them."""

__all__: list[str] = []
