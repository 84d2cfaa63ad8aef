# options: --scenario wrap --strong --preemptions 2 --deaths 0
# A run that is sealed while a collector attaches passes for the lane's oldest.
s/sealed && run.order < limit/sealed \&\& run.order < limit + 1000/
