"""Tables, figures and pages, drawn from result files and run folders. The command is `python
-m flashtrain.report`."""
