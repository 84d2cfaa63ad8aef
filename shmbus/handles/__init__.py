"""Handles of workers and trainers: producer, feeder, consumer, group, session, annotator."""
