"""Predicts time and memory of a training step, and searches the axes of a job: docs/guides/planner.md."""

from __future__ import annotations
