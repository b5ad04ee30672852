"""Measuring devices (`calibrate`) and making them slower on purpose (`throttle`)."""
