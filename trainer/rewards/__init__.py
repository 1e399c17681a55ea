"""Rewards: functions of the user's with TRL's signature, and functions that ship."""
