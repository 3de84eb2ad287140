"""Told before the run.

migrate: settings of ours from configs of other libraries; their words are tables in `peers/`.
"""
