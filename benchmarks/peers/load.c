/* Sends requests over keep-alive connections and measures the responses; prints one JSON object.

   load PORT PATH CONNECTIONS SECONDS RATE BODIES SEPARATOR
   RATE 0: each connection sends the next request once it has the last response. RATE > 0: requests
   a second, whether or not earlier ones are answered; latency counts from when a request was due.
   BODIES: a file of parts, each ended by a zero byte: a tail, then one prefix or more. Request n is
   prefix[n mod prefixes], n in two numbers with SEPARATOR between and behind them, and the tail. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEAD, SIZE, DATA, DATA_END, TRAILER, WHOLE };

struct conn {
    int fd, is_busy, is_up;
    char head[8192], own[600];
    struct iovec out[4]; /* what is left to send: of head, prefix, numbers, tail */
    size_t out_parts, head_length;
    int state, is_chunked, is_ok, is_stream, matched;
    unsigned long long left, line;
    long long due_us, last_us;
    struct conn *next_idle;
};

struct numbers {
    long long *values;
    size_t count, room;
};

static int loop, port, is_over;
static const char *path, *separator;
static struct iovec tail, *prefixes;
static size_t prefix_count;
static unsigned long long number, errors, tokens, started;
static long long next_due_us, interval_ns, begin_us, stop_us;
static struct numbers latencies, first_tokens, gaps;
static struct conn *idle;

static long long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void note(struct numbers *n, long long value) {
    if (n->count == n->room) {
        n->room = n->room ? n->room * 2 : 65536;
        n->values = realloc(n->values, n->room * sizeof *n->values);
        if (!n->values) abort();
    }
    n->values[n->count++] = value;
}

static void flush(struct conn *c) {
    while (c->out_parts) {
        struct iovec *first = c->out + 4 - c->out_parts;
        struct msghdr message = {.msg_iov = first, .msg_iovlen = c->out_parts};
        ssize_t n = sendmsg(c->fd, &message, MSG_NOSIGNAL);
        if (n < 0) return;
        for (; c->out_parts && (size_t)n >= first->iov_len; first++, c->out_parts--)
            n -= first->iov_len;
        if (c->out_parts) {
            first->iov_base = (char *)first->iov_base + n;
            first->iov_len -= n;
        }
    }
}

static void connect_again(struct conn *c) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event e = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = c};
    int on = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (c->fd < 0) abort();
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(c->fd, (void *)&a, sizeof a) && errno != EINPROGRESS) abort();
    if (epoll_ctl(loop, EPOLL_CTL_ADD, c->fd, &e)) abort();
}

static void start(struct conn *c, long long due_us) {
    struct iovec *prefix = prefixes + number % prefix_count;
    char *middle = c->own + 512;
    int m = snprintf(middle, sizeof c->own - 512, "%llu%s%llu%s", number % 90000 + 1000, separator,
                     number / 90000 + 1000, separator);
    int h = snprintf(c->own, 512,
                     "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     "Content-Length: %zu\r\n\r\n", path, prefix->iov_len + m + tail.iov_len);
    number++;
    started++;
    if (h >= 512) abort();
    c->out[0] = (struct iovec){c->own, h};
    c->out[1] = *prefix;
    c->out[2] = (struct iovec){middle, m};
    c->out[3] = tail;
    c->out_parts = 4;
    c->head_length = 0;
    c->state = HEAD;
    c->is_busy = 1;
    c->due_us = c->last_us = due_us;
    c->is_stream = c->matched = 0;
    flush(c);
}

static void become_idle(struct conn *c) {
    c->is_busy = 0;
    if (is_over) return;
    if (!interval_ns) start(c, now_us());
    else {
        c->next_idle = idle;
        idle = c;
    }
}

static void done(struct conn *c, long long now) {
    if (c->is_ok) note(&latencies, now - c->due_us);
    else errors++;
    if (c->is_stream && c->is_ok && !c->matched) errors++;
    become_idle(c);
}

static void lost(struct conn *c) {
    if (c->is_busy) errors++;
    close(c->fd);
    c->is_up = 0;
    c->is_busy = 0;
    if (!is_over) {
        usleep(100);
        connect_again(c);
    }
}

static void note_tokens(struct conn *c, const char *data, size_t length, long long now) {
    /* One token an event; the last event is [DONE]. */
    const char *at = data;
    while ((at = memmem(at, length - (at - data), "data: ", 6))) {
        at += 6;
        if (!strncmp(at, "[DONE]", 6)) break;
        tokens++;
        note(c->matched ? &gaps : &first_tokens, now - c->last_us);
        c->matched = 1;
        c->last_us = now;
    }
}

static void read_head(struct conn *c) {
    const char *field;
    c->head[c->head_length] = 0;
    c->is_ok = !strncmp(c->head, "HTTP/1.1 200", 12);
    c->is_chunked = strcasestr(c->head, "transfer-encoding: chunked") != NULL;
    c->is_stream = strcasestr(c->head, "text/event-stream") != NULL;
    field = strcasestr(c->head, "content-length:");
    c->left = field ? strtoull(field + 15, NULL, 10) : 0;
    c->state = c->is_chunked ? SIZE : c->left ? DATA : WHOLE;
    c->line = 0;
    c->head_length = 0;
}

static void take(struct conn *c, const char *data, size_t length, long long now) {
    size_t at = 0;
    while (at < length && c->state != WHOLE) {
        if (c->state == HEAD) {
            if (c->head_length >= sizeof c->head - 1) abort();
            c->head[c->head_length++] = data[at++];
            if (c->head_length >= 4 && !memcmp(c->head + c->head_length - 4, "\r\n\r\n", 4)) read_head(c);
        } else if (c->state == SIZE) {
            char byte = data[at++];
            if (byte == '\n') {
                c->left = strtoull(c->head, NULL, 16);
                c->state = c->left ? DATA : TRAILER;
                c->head_length = c->line = 0;
            } else if (c->head_length < 20) {
                c->head[c->head_length++] = byte;
                c->head[c->head_length] = 0;
            }
        } else if (c->state == DATA) {
            size_t part = length - at < c->left ? length - at : c->left;
            if (c->is_stream) note_tokens(c, data + at, part, now);
            at += part;
            c->left -= part;
            if (!c->left) c->state = c->is_chunked ? DATA_END : WHOLE;
        } else if (c->state == DATA_END) {
            if (data[at++] == '\n') c->state = SIZE;
        } else { /* TRAILER: ends with an empty line */
            char byte = data[at++];
            if (byte == '\n') {
                if (!c->line) c->state = WHOLE;
                c->line = 0;
            } else if (byte != '\r') c->line++;
        }
    }
    if (c->state == WHOLE && c->is_busy) done(c, now);
}

static void receive(struct conn *c) {
    static char data[1 << 18];
    for (;;) {
        ssize_t n = recv(c->fd, data, sizeof data, 0);
        if (n > 0) take(c, data, n, now_us());
        else if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        else {
            lost(c);
            return;
        }
    }
}

static int compared(const void *a, const void *b) {
    long long x = *(const long long *)a, y = *(const long long *)b;
    return (x > y) - (x < y);
}

static void print(const char *name, struct numbers *n) {
    if (!n->count) return;
    qsort(n->values, n->count, sizeof *n->values, compared);
    printf(", \"%s_p50_us\": %lld, \"%s_p99_us\": %lld, \"%s_max_us\": %lld", name,
           n->values[n->count / 2], name, n->values[n->count * 99 / 100], name,
           n->values[n->count - 1]);
}

static void read_bodies(const char *name) {
    FILE *file = fopen(name, "rb");
    char *data;
    long size;
    if (!file || fseek(file, 0, SEEK_END) || (size = ftell(file)) < 0) exit(2);
    rewind(file);
    data = malloc(size);
    if (!data || fread(data, 1, size, file) != (size_t)size || data[size - 1]) exit(2);
    tail = (struct iovec){data, strlen(data)};
    prefixes = calloc(size, sizeof *prefixes);
    if (!prefixes) exit(2);
    for (char *at = data + tail.iov_len + 1; at < data + size; at += strlen(at) + 1)
        prefixes[prefix_count++] = (struct iovec){at, strlen(at)};
    if (!prefix_count) exit(2);
    fclose(file);
}

int main(int argc, char **argv) {
    struct rlimit files;
    struct epoll_event found[512];
    double seconds, rate;
    int connections;
    struct conn *all;
    if (argc != 8) return 2;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    port = atoi(argv[1]);
    path = argv[2];
    connections = atoi(argv[3]);
    seconds = atof(argv[4]);
    rate = atof(argv[5]);
    read_bodies(argv[6]);
    separator = argv[7];
    number = getpid() % 1000 * 100000ULL; /* no two runs send the same prompt */
    loop = epoll_create1(0);
    interval_ns = rate > 0 ? (long long)(1e9 / rate) : 0;
    begin_us = now_us();
    stop_us = begin_us + (long long)(seconds * 1e6);
    next_due_us = begin_us;
    all = calloc(connections, sizeof *all);
    for (int i = 0; i < connections; i++) connect_again(&all[i]);
    for (;;) {
        long long now = now_us();
        int busy = 0, wait_ms = 10, count;
        if (now >= stop_us) {
            is_over = 1;
            for (int i = 0; i < connections; i++) busy += all[i].is_busy;
            if (!busy || now > stop_us + 20000000) break;
        }
        while (interval_ns && !is_over && next_due_us <= now) {
            struct conn *c = idle;
            if (!c) break; /* it stays due: its latency counts from then */
            idle = c->next_idle;
            start(c, next_due_us);
            next_due_us = begin_us + (long long)(started * (interval_ns / 1000.0));
        }
        if (interval_ns && !is_over && idle) wait_ms = next_due_us - now < 1000 ? 0 : 1;
        count = epoll_wait(loop, found, 512, wait_ms);
        for (int i = 0; i < count; i++) {
            struct conn *c = found[i].data.ptr;
            if (!c->is_up && found[i].events & EPOLLOUT && !(found[i].events & (EPOLLERR | EPOLLHUP))) {
                c->is_up = 1;
                if (!is_over) become_idle(c);
            } else if (c->is_up && found[i].events & EPOLLOUT) flush(c);
            if (found[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) receive(c);
        }
    }
    printf("{\"requests\": %zu, \"errors\": %llu, \"tokens\": %llu, \"seconds\": %.3f",
           latencies.count, errors, tokens, (now_us() - begin_us) / 1e6);
    print("latency", &latencies);
    print("first_token", &first_tokens);
    print("gap", &gaps);
    printf("}\n");
    return 0;
}
