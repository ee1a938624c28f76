"""Training that answers a question about a sequence: `task=classification`, the recipes lra-*, pathx and path256.

settings.py says what can be asked for; stages.py what each stage of a curriculum trains; build.py makes data, model and
task of it; run.py trains (curve.py keeps the learning curve, resume.py finds where to go on); weights.py carries
weights from stage to stage and into a file; evaluate.py tests them on fresh images; plan.py says what it would take;
speed*.py measures training steps; published.py, tables.py and figures.py show all beside the papers' figures.
"""
