# options: --scenario prompts --strong --preemptions 1 --deaths 1
# A feeder that died after it opened a row leaves it out of the order.
/^static void heal/,/^}/s/append(parts, index, \&row);//
