# options: --scenario asking --strong --preemptions 2 --deaths 0
# A claim stands although the row asks for something else by now.
/^bool wanted_claim/,/^}/s/now.number == number/(now.number == number || now.number != 0)/
