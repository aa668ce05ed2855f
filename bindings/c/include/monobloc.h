/* monobloc: runs a model from C.
 *
 * Every function that can fail returns a status; monobloc_last_error() has the message of the last one that
 * failed in the calling thread. A model may be used by several threads: its calls are done one after another.
 *
 * This file is generated from bindings/c/src/lib.rs. */

#ifndef MONOBLOC_H
#define MONOBLOC_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/*
 Version of this interface. It changes if the meaning of a function or a struct changes. New functions, and new fields at the end
 of monobloc_options, do not change it.
 */
#define MONOBLOC_ABI_VERSION 1

/*
 Result of a call. The numbers are the exit codes of the program.
 */
typedef enum {
  /*
   Done.
   */
  MONOBLOC_STATUS_OK = 0,
  /*
   The input has to change: a path, a manifest, an argument.
   */
  MONOBLOC_STATUS_INPUT = 2,
  /*
   The machine lacks something: a driver, a device, a file, memory.
   */
  MONOBLOC_STATUS_MACHINE = 3,
  /*
   A fault of monobloc itself.
   */
  MONOBLOC_STATUS_INTERNAL = 70,
} monobloc_status;

/*
 Which logits of a row are written.
 */
typedef enum {
  /*
   None.
   */
  MONOBLOC_LOGITS_OF_NONE = 0,
  /*
   Those after its last token.
   */
  MONOBLOC_LOGITS_OF_LAST = 1,
  /*
   Those after each of its tokens.
   */
  MONOBLOC_LOGITS_OF_EVERY = 2,
} monobloc_logits_of;

/*
 An open model.
 */
typedef struct monobloc_model monobloc_model;

/*
 Options for opening a model. A field of 0 or NULL takes its default.
 */
typedef struct {
  /*
   sizeof(monobloc_options), so that later versions can add fields.
   */
  size_t size;
  /*
   Name of a target; NULL: the first one.
   */
  const char *target;
  /*
   Folder of the cache, for manifests; NULL: the default of the program `monobloc`.
   */
  const char *cache;
  /*
   Most sequences that are open at a time; 0: as `monobloc serve`.
   */
  uint32_t sequences_max;
  /*
   Most tokens of one monobloc_step beyond one for each sequence; 0: as `monobloc serve`.
   */
  uint32_t chunk_max;
  /*
   Tokens that the cache holds for all sequences together; 0: four contexts, or the value of the manifest.
   */
  uint32_t cache_tokens;
  /*
   1: runs kernels whose numbers were not compared on a device of this kind, and says so on stderr; 0: compares them first.
   */
  uint32_t unchecked;
} monobloc_options;

/*
 A row of a step: a sequence with its next tokens.
 */
typedef struct {
  /*
   From monobloc_sequence_open() or monobloc_sequence_fork().
   */
  uint64_t sequence;
  /*
   One for a sequence that decodes, several for a part of a prompt.
   */
  const uint32_t *tokens;
  /*
   Tokens of this row.
   */
  size_t count;
  /*
   A value of monobloc_logits_of.
   */
  uint32_t logits;
} monobloc_row;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Version of the interface of this library; compare it with MONOBLOC_ABI_VERSION.
 */
uint32_t monobloc_abi_version(void);

/*
 Version of monobloc, as text that lives as long as the library.
 */
const char *monobloc_version(void);

/*
 Message of the last call that failed in this thread. It lives until the next call that fails in this thread.
 */
const char *monobloc_last_error(void);

/*
 Opens the folder of an export, a manifest, or a built-in model by its name. `options` may be NULL. Writes the model to
 `model`, or NULL on a fault. Close the model with monobloc_close().

 # Safety
 `place` is a string, `options` NULL or a struct of the size that it names, whose strings are strings; `model` can be written.
 */
monobloc_status monobloc_open(const char *place,
                              const monobloc_options *options,
                              monobloc_model **model);

/*
 Closes a model. NULL is no fault.

 # Safety
 `model` came from monobloc_open, is not closed, and no other call uses it.
 */
void monobloc_close(monobloc_model *model);

/*
 Logits of a position; all token ids are below it. 0 if `model` is NULL.

 # Safety
 `model` is NULL, or came from monobloc_open and is not closed.
 */
uint32_t monobloc_vocab(const monobloc_model *model);

/*
 Most positions of a sequence. 0 if `model` is NULL.

 # Safety
 `model` is NULL, or came from monobloc_open and is not closed.
 */
uint32_t monobloc_context_max(const monobloc_model *model);

/*
 Most tokens of one step. 0 if `model` is NULL.

 # Safety
 `model` is NULL, or came from monobloc_open and is not closed.
 */
uint32_t monobloc_rows_max(const monobloc_model *model);

/*
 Most sequences that are open at a time. 0 if `model` is NULL.

 # Safety
 `model` is NULL, or came from monobloc_open and is not closed.
 */
uint32_t monobloc_sequences_max(const monobloc_model *model);

/*
 Whether a token ends a text. False if `model` is NULL.

 # Safety
 `model` is NULL, or came from monobloc_open and is not closed.
 */
bool monobloc_is_eos(const monobloc_model *model, uint32_t token);

/*
 Opens a sequence without tokens, and writes its name to `sequence`. Names are never used again.

 # Safety
 `model` came from monobloc_open and is not closed; `sequence` can be written.
 */
monobloc_status monobloc_sequence_open(const monobloc_model *model, uint64_t *sequence);

/*
 Opens a sequence with the tokens of `from`, and writes its name to `fork`. Both share the full pages of the cache; tokens after
 the last full page are computed again.

 # Safety
 `model` came from monobloc_open and is not closed; `fork` can be written.
 */
monobloc_status monobloc_sequence_fork(const monobloc_model *model,
                                       uint64_t from,
                                       uint64_t *fork);

/*
 Writes the number of tokens of a sequence to `length`.

 # Safety
 `model` came from monobloc_open and is not closed; `length` can be written.
 */
monobloc_status monobloc_sequence_length(const monobloc_model *model, uint64_t sequence, uint32_t *length);

/*
 Removes the tokens of a sequence from `length` on.

 # Safety
 `model` came from monobloc_open and is not closed.
 */
monobloc_status monobloc_sequence_truncate(const monobloc_model *model, uint64_t sequence, uint32_t length);

/*
 Ends a sequence and frees its part of the cache. One that is not open is no fault.

 # Safety
 `model` came from monobloc_open and is not closed.
 */
monobloc_status monobloc_sequence_free(const monobloc_model *model, uint64_t sequence);

/*
 Appends `count` tokens to a sequence, in as many steps as needed. Writes the logits after the last one; `logits_count` is the
 vocabulary. If `logits` is NULL, nothing is written.

 # Safety
 `model` came from monobloc_open and is not closed; `tokens` has `count` values; `logits` is NULL or has room for `logits_count`.
 */
monobloc_status monobloc_prefill(const monobloc_model *model,
                                 uint64_t sequence,
                                 const uint32_t *tokens,
                                 size_t count,
                                 float *logits,
                                 size_t logits_count);

/*
 Runs one step of several sequences, each with its next tokens; a sequence has one row. All rows together have at most
 monobloc_rows_max() tokens. Writes the logits that the rows want, one after another; `logits_count` is their number times the
 vocabulary. If the call fails with MONOBLOC_STATUS_INPUT, no sequence has changed. After any other failure all sequences are gone.

 # Safety
 `model` came from monobloc_open and is not closed; `rows` has `count` values, each with `count` tokens; `logits` has room
 for `logits_count`.
 */
monobloc_status monobloc_step(const monobloc_model *model,
                              const monobloc_row *rows,
                              size_t count,
                              float *logits,
                              size_t logits_count);

/*
 Writes the logits after each of `count` tokens, which begin at position 0: `count` rows of the vocabulary. No sequence is changed.

 # Safety
 `model` came from monobloc_open and is not closed; `tokens` has `count` values; `logits` has room for `logits_count`.
 */
monobloc_status monobloc_logits(const monobloc_model *model,
                                const uint32_t *tokens,
                                size_t count,
                                float *logits,
                                size_t logits_count);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MONOBLOC_H */
