/* Continues token ids with the most probable tokens: greedy PLACE COUNT ID...
 *
 *   cc -I bindings/c/include bindings/c/examples/greedy.c -L target/release -lmonobloc_c -o greedy
 *   LD_LIBRARY_PATH=target/release ./greedy tinystories 16 0 467 468 262 421
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "monobloc.h"

static void check(monobloc_status status, const char *what) {
    if (status != MONOBLOC_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", what, monobloc_last_error());
        exit(status);
    }
}

int main(int argc, char **argv) {
    if (argc < 4 || monobloc_abi_version() != MONOBLOC_ABI_VERSION) {
        fprintf(stderr, "expected: greedy PLACE COUNT ID...\n");
        return 2;
    }
    monobloc_options options = {.size = sizeof options, .cache = getenv("CACHE")};
    monobloc_model *model;
    check(monobloc_open(argv[1], &options, &model), "open");

    uint32_t vocab = monobloc_vocab(model);
    size_t count = (size_t)argc - 3;
    float *logits = malloc(vocab * sizeof *logits);
    uint32_t *prompt = malloc(count * sizeof *prompt);
    if (!logits || !prompt) return 3;
    for (size_t i = 0; i < count; i++) prompt[i] = (uint32_t)strtoul(argv[i + 3], NULL, 10);

    uint64_t sequence;
    check(monobloc_sequence_open(model, &sequence), "sequence");
    check(monobloc_prefill(model, sequence, prompt, count, logits, vocab), "prefill");
    for (long left = strtol(argv[2], NULL, 10); left > 0; left--) {
        uint32_t best = 0;
        for (uint32_t id = 1; id < vocab; id++)
            if (logits[id] > logits[best]) best = id;
        printf("%" PRIu32 "\n", best);
        if (left == 1) break;
        monobloc_row row = {
            .sequence = sequence, .tokens = &best, .count = 1, .logits = MONOBLOC_LOGITS_OF_LAST};
        check(monobloc_step(model, &row, 1, logits, vocab), "step");
    }
    check(monobloc_sequence_free(model, sequence), "free");
    free(prompt);
    free(logits);
    monobloc_close(model);
    return 0;
}
