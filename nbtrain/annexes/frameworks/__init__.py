"""Ways in for other people's loops: functions that are called on ranks, and Lightning's Trainer."""
