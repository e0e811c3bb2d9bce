"""Private names of submitit 1.5."""

INHERITED = {
    # It writes the batch script. Where it has moved, a job fails before it is submitted.
    "submitit.SlurmExecutor": ("_make_submission_file_text",),
}
