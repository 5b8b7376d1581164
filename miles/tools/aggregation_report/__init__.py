"""What each mode of `--loss-aggregation` does to one's own rollouts, before a GPU is spent on it.

`python -m miles.tools.aggregation_report ROLLOUTS.pt` prints it. From dump to report: `options` (the command line),
`dumps` (files to columns of optimizer steps, by way of `bad_samples` and `conversion`), `weights` (what each sample
weighs, by the functions of training), `measures` and `report` (a JSON object of it), `table` (that object for a
terminal), `figure` (a picture).
"""
