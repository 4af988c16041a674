"""What is measured of a cell while it runs.

phases               where its time goes: data, forward, backward, waiting, optimizer
readings             what the dashboard is told; flop_count: operations; logged_values: `log(loss=loss)`
memory_peak          the most memory of a card or process
step_profile         `--profile`; trial_steps and step_record: each step of a trial
"""
