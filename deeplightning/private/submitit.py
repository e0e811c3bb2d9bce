"""Private names of submitit 1.5."""

INHERITED = {
    # They write the batch file and name the command that submits it, so that our own file is submitted. Where one has
    # moved, a job fails when it is submitted.
    "submitit.SlurmExecutor": ("_make_submission_file_text", "_submit_command"),
}
