# options: --scenario retry --strong --preemptions 2 --deaths 0
# A claim stands although the row asks for something else by now.
/^bool retry_claim/,/^}/s/copy->number == number/(copy->number == number || copy->number != 0)/
