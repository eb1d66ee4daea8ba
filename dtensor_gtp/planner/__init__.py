"""Predicts time and memory of a training step, and searches the axes of a job. docs/planner.md is the overview."""

from __future__ import annotations
